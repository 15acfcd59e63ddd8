"""The cores that this process may use: its affinity, and the limits of its control groups."""

import math
import os
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def num_threads(num_workers: int) -> int:
    """Return the number of compute threads of each of so many workers here."""
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if chosen.isdigit():
        return int(chosen)
    cores = min(len(os.sched_getaffinity(0)), limit()[0])
    return max(1, int(cores / num_workers))


def limit() -> tuple[float, Path]:
    """Return how many cores the control groups leave this process, and the strictest of them."""
    return min(_limits(), key=itemgetter(0), default=(math.inf, Path()))


def _limits() -> Iterator[tuple[float, Path]]:
    """Yield the limit of each group above this process, and its folder."""
    try:
        lines = OWN_GROUPS.read_text("ascii").splitlines()
    except (OSError, ValueError):
        return
    for _, kinds, path in (line.split(":", 2) for line in lines):
        if kinds and "cpu" not in kinds.split(","):
            continue
        top = GROUPS / kinds
        group = top / path.lstrip("/")
        files = "cpu.cfs_quota_us cpu.cfs_period_us" if kinds else "cpu.max"
        for each in (group, *group.parents):
            try:
                yield _cores(each, files), each
            except (OSError, ValueError):  # it sets no limit
                pass
            if each == top:
                break


def _cores(group: Path, files: str) -> float:
    text = " ".join((group / name).read_text("ascii") for name in files.split())
    quota_us, period_us = text.split()
    return math.inf if quota_us in ("max", "-1") else int(quota_us) / int(period_us)
