from gossipdp.observe.board import Speeds


def test_a_speed_is_over_the_time_asked_for_or_the_last_two_counts() -> None:
    speeds = Speeds()
    assert speeds.since("one", 0.0) == (None, None)
    for at_s, samples, num_bytes in ((0.0, 0, 0), (1.0, 10, 100), (2.0, 40, 600)):
        speeds.note("one", at_s, samples, num_bytes)
    assert speeds.since("one", 0.0) == (20.0, 300.0)
    assert speeds.since("one", 1.0) == (30.0, 500.0)
    assert speeds.since("one", 9.0) == (30.0, 500.0)


def test_bytes_have_a_speed_as_soon_as_they_were_known_twice() -> None:
    speeds = Speeds()
    speeds.note(3, 0.0, 0)
    speeds.note(3, 1.0, 10, 100)
    assert speeds.since(3, 0.0) == (10.0, None)
    speeds.note(3, 2.0, 20, 400)
    assert speeds.since(3, 0.0) == (10.0, 300.0)
    speeds.note(3, 3.0, 30)
    assert speeds.since(3, 0.0) == (10.0, None)
    # Meanwhile it was started again: what its former process sent is not compared.
    speeds.note(3, 4.0, 40, 7)
    assert speeds.since(3, 0.0) == (10.0, None)


def test_counts_that_fall_begin_anew() -> None:
    speeds = Speeds()
    speeds.note(0, 0.0, 50, 900)
    speeds.note(0, 1.0, 60, 5)
    assert speeds.since(0, 0.0) == (None, None)
    speeds.note(0, 2.0, 70, 25)
    assert speeds.since(0, 0.0) == (10.0, 20.0)
