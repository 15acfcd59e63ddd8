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

Three walks, each arrow from one file to the next (a test says that they are there):

A parameter, from one worker's step to its neighbour's next one.
optimizer.step → parallel/hooks → parallel/worker (stepped) → dynamics/state → dynamics/chunks
→ dynamics/update (its loops: dynamics/update_loops); then, in the gossip thread, gossip/loop
→ gossip/exchange → gossip/codec → dynamics/chunks (a snapshot) → links/tcp_link → the neighbour's
gossip/loop → gossip/exchange → gossip/codec → dynamics/chunks → dynamics/update, and with its next
step into its parameters. At the end, and in averaged(): protocol/consolidate or protocol/averages
→ protocol/reduction (whose turn it is) → gossip/sums (reads, adds, divides) → links/tcp_link.

comm_rate, from the argument to an exchange.
parallel/options → parallel/entry → protocol/exchange_rate if it is "auto" (gossip/processor tells
it what is idle) → protocol/worker → protocol/step_clock (when one is due) → protocol/pairing
→ protocol/neighbours (whom to ask) → gossip/loop.

A death, from a silence to the line about it.
links/tcp (nothing comes, or a dial is refused) → gossip/loop → protocol/peers (it is silent)
→ protocol/liveness (others are asked) → protocol/presence → protocol/members (it is dead, and all
hear so) → protocol/neighbours (a graph without it). A Notice of it: protocol/actions
→ gossip/snapshot → observe/log, observe/status → observe/events → cli/top. On its own machine:
launcher/supervisor → launcher/spares → parallel/entry (it joins the run again).
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
