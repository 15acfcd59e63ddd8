"""Asynchronous, decentralized data-parallel training for PyTorch: no barrier, no coordinator.

The layers; each imports only those to its left (a test says so):

    graph, dynamics  →  protocol  →  { simulate, runtime }  →  observe  →  parallel  →  cli

graph       topologies, exchange rates, the constants of A2CiD2
dynamics    the (x, c) state of a worker and what flow, step and exchange do to it
protocol    who exchanges when, membership, progress, termination: pure state machines
simulate    the same protocol on a virtual clock
runtime     the same protocol over sockets: links, the gossip thread, rendezvous, launchers
observe     what a run tells of itself: the log of each worker
parallel    GossipDataParallel: the module wrapper, optimizer hooks, schedules, statistics
workloads, report    built-in tasks; figures and pages from the logs
integrations    callbacks and strategies for the training loops of other frameworks
recipes     whole trainings from the original data: CIFAR-10, ImageNet, any text
reproduce   the paper's results by the simulator, as a page
cli         the command line

The way of a parameter: optimizer.step → parallel/gossip_engine (boundary) → runtime/shared_state
→ dynamics/state ← runtime/plain_exchange → runtime/tcp_link → the neighbour, and back the same way.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossipdp.errors import (
        GossipError,
        ModelChangedError,
        PeerLostError,
        PoisonedError,
        RefusedError,
        RendezvousError,
        SupersededError,
        WorkerFailedError,
    )
    from gossipdp.parallel.module import GossipDataParallel
    from gossipdp.parallel.schedule import large_batch_schedule, parameter_groups
    from gossipdp.parallel.stats import Consolidated, Stats
    from gossipdp.runtime.launcher import launch

__version__ = "0.1.0"

# Imported on first use: `gossipdp plan` needs no torch, and `import gossipdp` nothing at all.
_HOMES = {
    "GossipDataParallel": "gossipdp.parallel.module",
    "Stats": "gossipdp.parallel.stats",
    "Consolidated": "gossipdp.parallel.stats",
    "large_batch_schedule": "gossipdp.parallel.schedule",
    "parameter_groups": "gossipdp.parallel.schedule",
    "launch": "gossipdp.runtime.launcher",
    "GossipError": "gossipdp.errors",
    "RendezvousError": "gossipdp.errors",
    "RefusedError": "gossipdp.errors",
    "SupersededError": "gossipdp.errors",
    "PeerLostError": "gossipdp.errors",
    "ModelChangedError": "gossipdp.errors",
    "PoisonedError": "gossipdp.errors",
    "WorkerFailedError": "gossipdp.errors",
}

__all__ = [
    "Consolidated",
    "GossipDataParallel",
    "GossipError",
    "ModelChangedError",
    "PeerLostError",
    "PoisonedError",
    "RefusedError",
    "RendezvousError",
    "Stats",
    "SupersededError",
    "WorkerFailedError",
    "__version__",
    "large_batch_schedule",
    "launch",
    "parameter_groups",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'gossipdp' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
