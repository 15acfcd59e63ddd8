"""The idle watch reads what Linux tells of a thread and of the cores that it may use."""

import os

import pytest

from gossipdp.gossip import processor
from gossipdp.gossip.processor import Idle, IdleWatch
from gossipdp.launcher import cores


def watch(tmp_path, monkeypatch) -> IdleWatch:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2})
    made = IdleWatch()
    made._of_thread, made._of_machine = tmp_path / "schedstat", tmp_path / "stat"
    return made


def write(tmp_path, *, ran_s: float, waited_s: float, idle: dict[int, int], ticks: int) -> None:
    (tmp_path / "schedstat").write_text(f"{int(ran_s * 1e9)} {int(waited_s * 1e9)} 7\n")
    lines = ["cpu  0 0 0 0 0 0 0 0 0 0\n"]
    for core, each in idle.items():
        waits, busy = each // 4, ticks - each
        guest = stolen = busy // 2
        ran = f"{busy - stolen} 0 0 {each - waits} {waits} 0 0 {stolen} {guest} 0"
        lines.append(f"cpu{core} {ran}\n")
    (tmp_path / "stat").write_text("".join(lines) + "intr 5\n")


def test_what_ran_or_waited_was_busy_and_other_cores_do_not_count(tmp_path, monkeypatch):
    made = watch(tmp_path, monkeypatch)
    write(tmp_path, ran_s=1.0, waited_s=0.5, idle={0: 100, 1: 0, 2: 0}, ticks=200)
    assert made.look(10.0) is None
    write(tmp_path, ran_s=1.5, waited_s=1.5, idle={0: 140, 1: 200, 2: 0}, ticks=400)
    assert made.look(10.9) is None
    # Of 2 s the thread ran 0.5 and waited 1; two cores of 200 ticks each were idle for 40.
    assert made.look(12.0) == pytest.approx(Idle(core=0.2, thread=0.25))


def test_without_these_statistics_the_threads_own_clock_counts(tmp_path, monkeypatch):
    made = watch(tmp_path, monkeypatch)
    times_s = iter([3.0, 3.5, 3.75])
    monkeypatch.setattr(processor.time, "clock_gettime", lambda clock: next(times_s))
    (tmp_path / "schedstat").write_text("0 0 0\n")
    assert (made.look(0.0), made._ticks()) == (None, (0, 0))
    for text in ("cpu0 1 2 3\n", "cpu0 - - - - -\n"):
        made._of_machine.write_text(text)
        assert made._ticks() == (0, 0)
    assert made.look(1.0) == Idle(core=0.5, thread=0.5)
    (tmp_path / "schedstat").unlink()
    assert made.look(2.0) == Idle(core=0.75, thread=0.75)
    monkeypatch.undo()
    made._clock = 1000  # as if the thread had ended
    assert made.look(3.0) is None


def test_threads_that_help_the_training_thread_count_as_it(monkeypatch):
    made = IdleWatch(has_helpers=True)
    of_process_s, of_gossip_s = iter([5.0, 6.5]), iter([1.0, 1.75])
    monkeypatch.setattr(processor.time, "process_time", lambda: next(of_process_s))
    monkeypatch.setattr(processor.time, "thread_time", lambda: next(of_gossip_s))
    made.look(0.0)
    assert made.look(1.0).thread == pytest.approx(0.25)


LIMITS = {
    # Files below the mount, /proc/self/cgroup, and the idle share if 0.2 s of a second were used,
    # of which this process had 0.1.
    "none": ({}, "0::/\n", 1.0),
    "one group": ({"pod/cpu.max": "50000 100000\n"}, "0::/pod\n", 0.3),
    "the tightest of several": (
        {"pod/cpu.max": "50000 100000\n", "pod/box/cpu.max": "max 100000\n"},
        "1:name=systemd:/\n0::/pod/box\n",
        0.3,
    ),
    "a group that is beyond its limit": ({"pod/cpu.max": "10000 100000\n"}, "0::/pod\n", 0.0),
    "the first version": (
        {"cpu/pod/cpu.cfs_quota_us": "50000", "cpu/pod/cpu.cfs_period_us": "100000"},
        "3:cpu:/pod\n0::/\n",
        0.4,
    ),
    "no limit in the first version": (
        {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
        "3:cpu:/\n",
        1.0,
    ),
}


@pytest.mark.parametrize("throttled", [0, 1, 4])
@pytest.mark.parametrize("name", LIMITS)
def test_what_a_container_may_not_use_is_not_idle(name, throttled, tmp_path, monkeypatch):
    files, own, idle = LIMITS[name]
    for path, text in files.items():
        file = tmp_path / "groups" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "own").write_text(own)

    def tell(used_ms: int, periods: int, throttled: int) -> None:
        for folder in {tmp_path / "groups" / path for path in files}:
            usage = "" if "cpu.cfs" in folder.name else f"usage_usec {used_ms}000\n"
            stat = f"nr_periods {periods}\nnr_throttled {throttled}\n{usage}"
            folder.with_name("cpu.stat").write_text(stat)

    tell(7000, 100, 30)
    times_s = iter([1.0, 1.1, 1.2, 1.3])
    monkeypatch.setattr(processor.time, "process_time", lambda: next(times_s))
    monkeypatch.setattr(cores, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(cores, "OWN_GROUPS", tmp_path / "own")
    made = watch(tmp_path, monkeypatch)
    write(tmp_path, ran_s=1.0, waited_s=0.0, idle={0: 0, 2: 0}, ticks=0)
    made.look(0.0)
    write(tmp_path, ran_s=1.2, waited_s=0.6, idle={0: 100, 2: 100}, ticks=100)
    tell(7200, 110, 30 + throttled)
    found = made.look(1.0)
    share = 0.0 if idle == 1.0 else throttled / 10  # without a limit nothing is throttled
    assert found.core == pytest.approx((1 - share) * idle)
    assert found.thread == pytest.approx(0.2)
    # In the periods in which it was throttled it had 0.2 s of the 0.8 s that it wanted.
    assert found.ran == pytest.approx(1 - share * 0.75)
    tell(7400, 120, 30 + 2 * throttled)
    assert made.look(2.0).ran == 1.0, "it wanted nothing meanwhile"
    assert made.look(3.0).ran == 1.0, "no period has ended meanwhile"
