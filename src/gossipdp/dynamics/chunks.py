"""The (x, c) state of one worker, cut into chunks, each with the lock that two threads share.

The training thread and the gossip thread meet here and nowhere else. The rules:

* The main thread alone writes ``x`` (optimizer, boundary, loading, the average), except at the
  start: there the gossip thread writes it while the main thread only waits. A snapshot torn by a
  running step is harmless: both ends of the exchange use that same snapshot.
* ``pending``, ``c`` and the phases are read and written under the chunk's lock. A thread holds one
  lock at a time, for one pass over one chunk, and never across I/O, so nothing can deadlock. The
  boundary only *tries* it: a chunk in use keeps its pending for the next boundary, so training
  never waits for a thread of lower priority.
* The lock is free between a chunk's snapshot and the arrival of the peer's, and a boundary may flow
  the chunk and move pending into x. That changes neither x + pending at the phase of the exchange
  nor delta, which comes from the stored snapshots. The chunk remembers the phase it has been flowed
  to, so boundary or exchange flows it once, whichever comes first; and the phase at which an
  exchange last wrote c: the two say how far c has decayed, and no flow passes over c to write it.
* Ctrl+C, or any other exception of a signal's handler in the main thread, leaves no lock taken, and
  each chunk as it was before the boundary or after it: one call of C makes all changes to a chunk
  and its notes (:func:`~gossipdp.dynamics.update.at_once`).
* The boundary of a large model has helper threads. They work only while the main thread is in
  that boundary, so to all others it is the main thread that writes.

On a device that only queues work, :mod:`~gossipdp.dynamics.device` has further rules, and trained
parameters have two pendings (:mod:`~gossipdp.dynamics.inboxes`).
"""

import enum
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gossipdp.dynamics import update
from gossipdp.dynamics.device import Device

# A flow that would leave less of c than this takes all of it: less is lost in any sum, and numbers
# too small for the processor's fast path are never met.
LEAST_LEFT = 2.0**-60


class Role(enum.Enum):
    """The treatment of a segment's values when workers meet."""

    TRAINED = "trained"
    """Parameters that optimizers change: exchanged, and counted in distances."""
    BUFFER = "buffer"
    """BatchNorm's statistics: exchanged by plain averaging, without c."""
    COPIED = "copied"
    """Other buffers, such as queues, masks and counters: each worker's own; at the end all workers
    take those of the lowest rank."""
    UNOPTIMIZED = "unoptimized"
    """Parameters of no optimizer, such as target networks: averaged when the average is made."""
    FROZEN = "frozen"
    """A large frozen base: left where it is, neither sent nor saved, and no part of a state."""
    MOMENT = "moment"
    """Moments that an optimizer keeps of trained parameters: averaged by some exchanges, never at
    the end. Each worker holds, saves and gives its own, as a part of its optimizer's state."""

    @property
    def is_exchanged(self) -> bool:
        """True if exchanges average these values."""
        return self in (Role.TRAINED, Role.BUFFER, Role.MOMENT)

    @property
    def is_averaged(self) -> bool:
        """True if the average of all workers includes these values."""
        return self in (Role.TRAINED, Role.BUFFER, Role.UNOPTIMIZED)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the precision of ``c`` and ``pending`` for parameters of ``dtype``."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Chunk:
    """One or more MiB of the state: the unit that is locked, sent and applied, whole or not at all.

    ``x + pending`` is "the parameters" wherever others see them. All tensors are one-dimensional
    and of one length; pending is empty if the values are not exchanged.

    Attributes:
        x: the parameter storage itself.
        pending: the sum of exchanges and flow that the next boundary adds.
        c: the momentum as it was at ``theta_c``; None under plain averaging.
        theta: the phase this chunk has been flowed to.
        theta_c: the phase at which c was written; minus infinity if there is no momentum, and c
            then counts as zero.
        has_pending: True if the next boundary has anything to add. Known zeros are not added: with
            no exchange, training is bitwise that of the plain loop.
        is_compiled: True if numba's loops compute here.
        is_square: True if the values are means of squares: float32, and never negative.
        lock: guards pending, c, the phases and the flags; see the module.
        order: entered under the lock, so that a device does the holders' work in their order.
    """

    def __init__(self, role: Role, x: Tensor, pending: Tensor, c: Tensor | None) -> None:
        self.role = role
        self.index = 0
        self.x = x
        self.pending = pending
        self.c = c
        self.theta = 0.0
        self.theta_c = -math.inf
        self.has_pending = False
        self.is_compiled = self.is_square = False
        self.device = Device()
        self._snapshot_at = 0
        self.lock = threading.Lock()
        self.order = self.device.order()

    @property
    def num_elements(self) -> int:
        return self.x.numel()

    # The main thread's part.

    def boundary(self, theta: float, *, wait: bool = False) -> bool:
        """Flow to the phase ``theta``, then x += pending; return False if the chunk is in use.

        With ``wait``, wait for the chunk instead.
        """
        # The interpreter runs signals' handlers between bytecodes, and there only at the start of
        # a function, at a jump back, and when a call returns. So ``with lock:`` is safe if the lock
        # is one of C (bpo-29988), and so is a ``finally`` that releases one first. ``acquire()``
        # before the ``try`` is not: one call of C takes the lock and notes it.
        taken: list[bool] = []
        try:
            taken.extend(map(self.lock.acquire, (wait,)))
            if True not in taken:
                return False
            with self.order:
                share, _ = self._flow(theta)
                is_due = self.has_pending or share != 0.0
                update.at_once(
                    *(self._additions(share) if is_due else ()),
                    partial(setattr, self, "has_pending", False),
                    partial(setattr, self, "theta", max(self.theta, theta)),
                )
        finally:
            if True in taken:
                self.lock.release()
        return True

    def forget(self, part: slice) -> None:
        """Reset everything but x in a part whose values were loaded; no exchange is in flight."""
        with self.lock, self.order:
            self._forget(part)

    def restored(self) -> None:
        """Note that x, pending and c are those of a checkpoint, at phase 0."""
        self.has_pending = bool(self.pending.any())
        if self.c is not None and bool(self.c.any()):
            self.theta_c = self.theta

    # Either thread's part.

    def read(self, out: Tensor, c: Tensor | None = None, theta: float = 0.0) -> None:
        """Write x + pending as they will be at the phase ``theta``, and to ``c`` the c of then.

        A chunk that has been flowed further is read as it is; of one that is not exchanged, x.
        Nothing else is written.
        """
        with self.lock, self.order:
            share, left = self._flow(theta)
            self.device.write(lambda out: self._write(out, share), out)
            if c is not None and self.c is not None:
                momentum = self.c
                self.device.write(lambda out: torch.mul(momentum, left, out=out), c)

    def read_z(self, out: Tensor) -> None:
        """Write z = x + pending + c/2, where the flow ends: a joiner starts there."""
        self.read(out, theta=math.inf)

    # The gossip thread's part. Snapshots are in host memory.

    def snapshot(self, theta: float, out: Tensor) -> bool:
        """Write x + pending as they are at the phase ``theta``; return True if all is finite.

        Nothing else is written: the exchange or a boundary does the flow itself. That changes no
        snapshot, as theta stands still meanwhile.
        """
        with self.lock, self.order:
            found = self._snapshot(self.device.on_device(out), self._flow(theta)[0])
            self._snapshot_at = out.data_ptr()
            if isinstance(found, bool):
                self.device.store(out)
                return found
            return update.is_finite(out, self.device.store(out, found))

    def exchange(self, theta: float, mine: Tensor, peers: Tensor, alpha_tilde: float) -> float:
        """Flow to ``theta`` and apply one exchange; return the squared norm of delta.

        Both ends compute delta from the same two (rounded) snapshots, never from a live value,
        so their deltas are exact negatives and the mean of x + c/2 is conserved. A delta that is
        not finite is not applied, nor is the flow; the norm returned is then not finite either.
        ``alpha_tilde`` is the gain of the exchange on x_tilde.
        """
        with self.lock, self.order:
            both = self._mine(mine), self.device.load(1, peers)
            squared_norm = self._exchange(*both, self._flow(theta), alpha_tilde)
            self._exchanged(squared_norm, theta)
            return squared_norm

    def exchange_coded(
        self, theta: float, coded: tuple[Tensor, Tensor, Tensor], alpha_tilde: float
    ) -> float:
        """Do the same with a coded delta: see :func:`.update.exchange_coded`."""
        with self.lock, self.order:
            numbers = *self._flow(theta), alpha_tilde
            squared_norm = update.exchange_coded(self.pending, self.c, coded, *numbers)
            self._exchanged(squared_norm, theta)
            return squared_norm

    def replace(self, values: Tensor) -> None:
        """Set x to these values and all else to zero, while the main thread only waits."""
        with self.lock, self.order:
            self.x.copy_(values)
            self._reset()
            self.device.finish()

    # Under the lock.

    def _brought(self) -> Tensor:
        return self.pending

    def _mine(self, mine: Tensor) -> Tensor:
        """Return our snapshot on the device, where the last one is still there."""
        kept = self.device.kept(mine) if mine.data_ptr() == self._snapshot_at else None
        return self.device.load(0, mine) if kept is None else kept

    def _additions(self, share: float) -> list[Callable[[], object]]:
        """Return the operations that flow and add pending to x, for :func:`.update.at_once`."""
        options = {"has_pending": self.has_pending, "compiled": self.is_compiled}
        return update.boundary_operations(self.x, self.pending, self.c, share, **options)

    def _write(self, out: Tensor, share: float) -> None:
        if self.role.is_exchanged:
            update.read(out, self.x, self._brought(), self.c, share)
        else:
            out.copy_(self.x)

    def _snapshot(self, out: Tensor, share: float) -> bool | Tensor:
        """Write it; return True if all is finite, or a sum that is finite if all is."""
        state = self.x, self._brought(), self.c
        return update.snapshot(out, *state, share, compiled=self.is_compiled)

    def _exchange(
        self, mine: Tensor, peers: Tensor, flow: tuple[float, float], alpha_tilde: float
    ) -> float:
        numbers, compiled = (*flow, alpha_tilde), self.is_compiled
        return update.exchange(self.pending, self.c, mine, peers, *numbers, compiled=compiled)

    def _flow(self, theta: float) -> tuple[float, float]:
        """Return the share of c that the flow to ``theta`` adds to x, and the share it leaves."""
        left = self._left(max(theta, self.theta))
        return 0.5 * (self._left(self.theta) - left), left

    def _left(self, theta: float) -> float:
        """Return the share of c that is left at ``theta``; 0 if there is no momentum."""
        left = math.exp(-2.0 * (theta - self.theta_c))
        return left if left >= LEAST_LEFT else 0.0

    def _exchanged(self, squared_norm: float, theta: float) -> None:
        if math.isfinite(squared_norm):
            self.theta = max(self.theta, theta)
            self.has_pending = True
            if self.c is not None:
                self.theta_c = self.theta

    def _forget(self, part: slice) -> None:
        self.pending[part].zero_()
        if self.c is not None:
            self.c[part].zero_()

    def _reset(self) -> None:
        self._forget(slice(None))
        self.has_pending = False
        # A worker that takes another's state starts its phase again.
        self.theta, self.theta_c = 0.0, -math.inf


class BufferChunk(Chunk):
    """A chunk of float buffers, which forward passes change between two boundaries.

    ``pending`` holds the present values as the last exchange left them, and ``seen`` x as it was
    then (both zero if there was none since the boundary). What forward passes have changed since
    counts whole: the present values are ``pending + (x - seen)``. So exchanges conserve the mean
    over workers, however many there are in the time of a step, and also where forward passes come
    between snapshot and exchange. A limit keeps running variances positive; see
    :func:`~gossipdp.dynamics.update.carry_on`.
    """

    def __init__(self, role: Role, x: Tensor, pending: Tensor, c: Tensor | None) -> None:
        super().__init__(role, x, pending, c)
        self.seen = torch.zeros_like(pending)

    # Under the lock.

    def _present(self, x: Tensor) -> Tensor:
        return update.carry_on(self.pending, self.seen, x)

    def _copy_of_x(self) -> Tensor:
        """Return x in pending's precision, each value read once: a forward pass may write it."""
        return update.scratch(self.pending).copy_(self.x)

    def _additions(self, share: float) -> list[Callable[[], object]]:
        present = self._present(self.x)
        return [partial(self.x.copy_, present), self.pending.zero_, self.seen.zero_]

    def _write(self, out: Tensor, share: float) -> None:
        out.copy_(self._present(self._copy_of_x()))

    def _snapshot(self, out: Tensor, share: float) -> bool:
        self._write(out, share)
        return update.is_finite(out)

    def _exchange(
        self, mine: Tensor, peers: Tensor, flow: tuple[float, float], alpha_tilde: float
    ) -> float:
        average = update.scratch(self.pending, 1)
        squared_norm = update.exchange(average, None, mine, peers, *flow, alpha_tilde)
        if math.isfinite(squared_norm):
            average.copy_(mine).add_(peers).mul_(0.5)  # the same bits at both ends
            x = self._copy_of_x()
            self.pending.copy_(update.carry_on(average, mine, self._present(x)))
            self.seen.copy_(x)
        return squared_norm

    def _forget(self, part: slice) -> None:
        super()._forget(part)
        self.seen[part].zero_()


@dataclass
class Moment:
    """One tensor that an optimizer keeps of each parameter, such as Adam's ``exp_avg_sq``.

    Attributes:
        name: in the optimizer's state.
        period: one exchange in so many carries it.
        decay: the share of it that a step keeps (beta); 0 if the optimizer corrects no bias.
        steps: the optimizer's age t; 0: it has no such tensor yet. Written by the main thread.
        is_unsound: True if some of it could not be sent. Written by the gossip thread.
    """

    name: str
    period: int
    decay: float = 0.0
    steps: int = 0
    is_unsound: bool = False

    @property
    def mass(self) -> float:
        """The divisor 1 - beta^t of the optimizer's bias correction; 0 before its first step."""
        return 1.0 - self.decay**self.steps


class MomentChunk(Chunk):
    r"""A chunk of a moment, in the optimizer's own memory.

    Workers average the corrected moment :math:`\hat v = v / (1 - \beta^t)`, since their ages t
    differ. Its present value is ``weight x / mass + pending``, with the present mass
    :math:`1 - \beta^t`; an exchange halves both and adds half of the peer's. So a second moment
    stays positive, however many steps the optimizer makes between snapshot and boundary.

    If v itself were averaged, workers at t = 20 and t = 400 (beta 0.999) would then take steps of a
    third and of 1.4 times their size.

    Zeros are not averaged: a chunk that sends nothing else takes nothing in that exchange. It sends
    them if no parameter had a gradient yet, if its optimizer has made no step, or if a value is not
    finite in the precision in which it travels: after one huge gradient a second moment is infinite
    for good, beside finite parameters.
    """

    def __init__(
        self, role: Role, x: Tensor, pending: Tensor, c: Tensor | None, moment: Moment
    ) -> None:
        super().__init__(role, x, pending, c)
        self.weight = 1.0
        self._moment = moment
        self.is_square = moment.name == "exp_avg_sq" and x.dtype == torch.float32
        self._gives = False  # in this exchange; the gossip thread's

    # Under the lock. Each method reads the mass once, as the main thread may change it.

    def _additions(self, share: float) -> list[Callable[[], object]]:
        mass = self._moment.mass
        if mass == 0.0:  # the optimizer was reset since
            return [self.pending.zero_, partial(setattr, self, "weight", 1.0)]
        return [
            partial(self.pending.mul_, mass),
            partial(self.pending.add_, self.x, alpha=self.weight),
            partial(self.x.copy_, self.pending),
            self.pending.zero_,  # a rounding remainder would stay while x shrinks
            partial(setattr, self, "weight", 1.0),
        ]

    def _write(self, out: Tensor, share: float) -> None:
        values = torch.mul(self.pending, self._moment.mass, out=update.scratch(self.pending))
        torch.add(values, self.x, alpha=self.weight, out=out)

    def _snapshot(self, out: Tensor, share: float) -> bool:
        mass = self._moment.mass
        self._gives = mass != 0.0
        if self._gives:
            torch.add(self.pending, self.x, alpha=self.weight / mass, out=out)
            total = float(out.sum(dtype=torch.float32))
            is_finite = update.is_finite(out, total)
            self._moment.is_unsound |= not is_finite
            self._gives = is_finite and _has_any(out, total)
        if not self._gives:
            out.zero_()
        return True

    def _exchange(
        self, mine: Tensor, peers: Tensor, flow: tuple[float, float], alpha_tilde: float
    ) -> float:
        """Average, and return 0: the distance is not worth its passes."""
        theirs = update.scratch(self.pending).copy_(peers)
        total = float(theirs.sum(dtype=torch.float32))
        if not update.is_finite(theirs, total):
            return math.inf
        if self._gives and _has_any(theirs, total):
            self.pending.add_(theirs).mul_(0.5)
            self.weight *= 0.5
        return 0.0


def _has_any(values: Tensor, total: float) -> bool:
    """Return whether a value is not zero; their sum is 20 times as fast as a look at each."""
    return total != 0.0 or bool(values.any())
