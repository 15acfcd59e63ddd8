"""The clock that runs on while the machine is suspended."""

import time

from gossipdp.links.clock import boot_id, since_boot_s


def test_it_is_the_kernels_clock_that_counts_suspend_too() -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    now_s = since_boot_s()
    assert before <= now_s <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_a_boot_has_one_name() -> None:
    assert boot_id() == boot_id() != ""
