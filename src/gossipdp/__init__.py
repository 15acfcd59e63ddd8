"""Asynchronous, decentralized data-parallel training for PyTorch: no barrier, no coordinator.

The layers; each imports only those to its left (a test says so):

    graph, dynamics  →  protocol  →  links  →  launcher  →  gossip  →  observe  →  parallel
    →  integrations, cli

graph       topologies, exchange rates, the constants of A2CiD2
dynamics    the (x, c) state of a worker and what flow, step and exchange do to it
protocol    who exchanges when, membership, progress, termination: pure state machines
links       bytes between two workers: frames, handshake, TCP, TLS, shared memory
launcher    who am I, rendezvous, supervisor, launch()
gossip      the gossip thread: exchanges, state transfers, averaging
observe     what a run shows of itself: each worker's log and status, and a view of all
parallel    GossipDataParallel: the module wrapper, optimizer hooks, schedules, statistics
integrations    callbacks and strategies for the training loops of other frameworks
cli         the command line

Demo, built-in trainings, simulator and report page are in gossipdp_lab.

Three walks; each file hands on to the next (a test says that all of them are there):

A parameter, from one worker's step to its neighbour's next one.
optimizer.step → parallel/hooks → parallel/worker (stepped) → dynamics/state → dynamics/chunks
→ dynamics/update (its loops: dynamics/update_loops). Then, in the gossip thread, gossip/loop
→ gossip/exchange: by gossip/codec it takes a snapshot from dynamics/chunks, and hands that to
links/tcp_link → the neighbour's gossip/loop → gossip/exchange → gossip/codec → dynamics/chunks
→ dynamics/update, and with its next step into its parameters. At the end, and in averaged(),
protocol/worker asks protocol/consolidate or protocol/averages, and both protocol/reduction, whose
turn it is; gossip/loop has gossip/sums read, add, divide and send.

comm_rate, from the argument to an exchange.
parallel/options → parallel/entry → protocol/exchange_rate if it is "auto" (gossip/processor tells
it what is idle) → protocol/worker. That asks protocol/step_clock when one is due, and
protocol/pairing for it, which draws whom to ask from protocol/neighbours → gossip/loop.

A death, from a silence to the line about it.
links/tcp (nothing comes, or a dial is refused) → gossip/loop → protocol/worker, which polls
protocol/liveness: it reads protocol/peers, asks others, and declares the worker dead in
protocol/members, whose news all hear. protocol/presence turns that into a Notice, and
protocol/neighbours into a graph without the worker. The Notice: gossip/loop → gossip/snapshot
→ parallel/worker (stats) → parallel/monitoring → observe/log, and observe/status → observe/board
→ observe/events → cli/top. On its own machine: launcher/supervisor → launcher/processes
→ cli/run → launcher/local; the new process comes in by parallel/entry.
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
    from gossipdp.launcher.local import launch
    from gossipdp.parallel.module import GossipDataParallel
    from gossipdp.parallel.options import Checkpoints, Counting, Exchange, Monitor, Network
    from gossipdp.parallel.schedule import ProgressLR, parameter_groups
    from gossipdp.parallel.stats import Consolidated, Stats

__version__ = "0.3.0.dev0"

# Imported on first use: `gossipdp plan` needs no torch, and `import gossipdp` nothing at all.
_OPTIONS = ("Exchange", "Counting", "Network", "Checkpoints", "Monitor")
_HOMES = {
    "GossipDataParallel": "parallel.module",
    **dict.fromkeys(_OPTIONS, "parallel.options"),
    **dict.fromkeys(("Stats", "Consolidated"), "parallel.stats"),
    **dict.fromkeys(("ProgressLR", "parameter_groups"), "parallel.schedule"),
    "launch": "launcher.local",
}
"""The modules of the public names; the others are errors."""

__all__ = [
    "Checkpoints",
    "Consolidated",
    "Counting",
    "Exchange",
    "GossipDataParallel",
    "GossipError",
    "ModelChangedError",
    "Monitor",
    "Network",
    "PeerLostError",
    "PoisonedError",
    "ProgressLR",
    "RefusedError",
    "RendezvousError",
    "Stats",
    "SupersededError",
    "WorkerFailedError",
    "__version__",
    "launch",
    "parameter_groups",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'gossipdp' has no attribute {name!r}")
    value = getattr(import_module(f"gossipdp.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
