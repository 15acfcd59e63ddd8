"""When moments travel: with one exchange in so many, or after so many steps."""

import itertools

import pytest

from gossipdp.protocol.numbering import Numbering


def make(num_steps: float) -> Numbering:
    return Numbering(lambda number: number % 2 == 0, num_exchanges=4, num_steps=num_steps)


@pytest.mark.parametrize(
    ("num_steps", "comm_rate", "between"),
    [
        (250, 4.0, 4),
        (250, 1.0, 4),
        (250, 1 / 8, 4),
        # Sooner, where so many steps have passed.
        (2.5, 4.0, 4),
        (2.5, 1.0, 3),
        (16, 1 / 8, 2),
        (5, 1 / 8, 1),
    ],
)
def test_one_exchange_in_four_carries_moments_and_more_where_these_are_rare(
    num_steps: float, comm_rate: float, between: int
) -> None:
    numbering = make(num_steps)
    numbers, carried, due = [0], [], 0.0
    for _ in range(240):
        numbering.step()
        due += comm_rate
        while due >= 1.0:
            due -= 1.0
            numbers.append(numbering.from_(numbers[-1] + 1))
            numbering.began(numbers[-1])
            if numbers[-1] % 2 == 0:
                carried.append(len(numbers))
    assert numbers == sorted(set(numbers))
    assert {after - before for before, after in itertools.pairwise(carried)} == {between}


def test_an_exchange_that_a_peer_asked_for_counts_too() -> None:
    numbering = make(num_steps=100)
    for number in (1, 3, 5):
        numbering.began(number)
    assert numbering.from_(7) == 8
    numbering.began(100)
    assert numbering.from_(8) == 9


@pytest.mark.parametrize("always", [False, True])
def test_without_moments_or_with_all_of_them_numbers_go_on(always: bool) -> None:
    numbering = Numbering(lambda number: always, num_exchanges=2, num_steps=2)
    for number in range(5):
        assert numbering.from_(number) == number
        numbering.step()
