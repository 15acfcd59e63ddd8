"""Training tasks that are on every machine: for the demo, the benchmarks and the simulator.

workload      what a task offers: model, optimizer, batches, loss, metric
digits        handwritten digits, a small convolutional network with BatchNorm
pystdlib      Python's standard library as text, a byte-level transformer
"""

from gossipdp.workloads.digits import Digits
from gossipdp.workloads.pystdlib import PyStdlib
from gossipdp.workloads.workload import BatchLoader, Workload, learning_rate_factor

WORKLOADS: dict[str, type[Digits] | type[PyStdlib]] = {
    Digits.name: Digits,
    PyStdlib.name: PyStdlib,
}


def make_workload(name: str, *, disjoint: bool = False, batch_size: int | None = None) -> Workload:
    """The built-in workload of this name.

    >>> make_workload("digits").metric_name
    'test_accuracy'
    """
    if name not in WORKLOADS:
        raise ValueError(f"there is no workload {name!r}; choose one of {', '.join(WORKLOADS)}")
    return WORKLOADS[name](disjoint=disjoint, batch_size=batch_size)


__all__ = [
    "WORKLOADS",
    "BatchLoader",
    "Digits",
    "PyStdlib",
    "Workload",
    "learning_rate_factor",
    "make_workload",
]
