"""The errors gossipdp raises.

    GossipError
    ├── RendezvousError      workers did not find one another in time, or a port is in use
    ├── RefusedError         another worker refused us (model, method, graph, secret differ), or a
    │   │                    directory for checkpoints or logs: full, or another run is alive in it
    │   └── SupersededError  another process has this worker's rank and place in the run
    ├── PeerLostError        a worker that we waited for is gone, or all are since we stood still
    ├── ModelChangedError    parameters were moved, replaced or unfrozen behind the wrapper's back
    ├── PoisonedError        this worker's parameters turned NaN or infinite
    └── WorkerFailedError    a worker started by the launcher ended with an error

A mistake in an argument is a ``ValueError``. Every message says what happened, names the value
and says what to do next.
"""


class GossipError(RuntimeError):
    """Base of every error that gossipdp raises about a run."""


class RendezvousError(GossipError):
    """The workers did not find one another within the start time-out, or a port is in use."""


class RefusedError(GossipError):
    """Another worker refused this one, or a directory did; the message says why."""


class SupersededError(RefusedError):
    """Another live process has this worker's rank and has taken its place in the run."""


class PeerLostError(GossipError):
    """A worker that an operation needed died, or showed no life for longer than the time-out.

    Also raised by one that stood still itself, and then finds no other in the run.
    """


class ModelChangedError(GossipError):
    """The wrapped module's parameters were moved, replaced, unfrozen or written over."""


class PoisonedError(GossipError):
    """The parameters of this worker hold NaN or infinity; they are not sent to anyone."""


class WorkerFailedError(GossipError):
    """A worker process ended with an error; the message carries its traceback."""
