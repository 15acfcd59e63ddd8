"""The (x, c) state of one worker, cut into chunks, each with the lock that two threads share.

The training thread and the gossip thread meet here and nowhere else. The rules:

* ``x`` is written by the main thread only (optimizer, boundary, loading); or by the gossip thread
  while the main thread only waits for it: at the start and in ``consolidate``. The gossip thread
  reads x for a snapshot without stopping the optimizer. A snapshot torn by a running step is
  harmless, because both ends of the exchange use that same snapshot.
* ``pending``, ``c``, the phases and what the outer step has are read and written under the chunk's
  lock: by the gossip thread in an exchange, by the main thread at a boundary.
* The outer step reads x as a snapshot does, under the lock but beside a running optimizer. What it
  read of each value is the new base; the rest of the optimizer's step counts in the next one.
* The boundary only *tries* the lock. A chunk in use keeps its pending for the next boundary, so
  training never waits for a thread of lower priority.
* A lock is held for one pass over one chunk, never across I/O and never two at a time. So there is
  no order of locks to respect and nothing to deadlock.
* Ctrl+C, or whatever else a signal's handler raises in the main thread, leaves no lock taken, and
  each chunk as it was before the boundary or after it. The interpreter runs handlers between
  bytecodes, and there only at the start of a function, at a jump back, and when a call returns. So
  ``with lock:`` is safe as long as the lock is one of C (nothing is looked at between taking it and
  the ``with``; bpo-29988), and so is a ``try`` whose ``finally`` does nothing before it releases
  one. ``acquire()`` before the ``try`` is not, nor is a lock written in Python. What changes a
  chunk, and the notes on it, are one call of C (:func:`~gossipdp.dynamics.update.at_once`).
* Between a chunk's snapshot and the arrival of the peer's the lock is free, and a boundary may flow
  the chunk and move pending into x. That changes neither x + pending at the phase of the exchange
  nor delta, which comes from the stored snapshots. A snapshot writes nothing: the chunk remembers
  the phase it has been flowed to, so the flow is done once, by whichever of boundary and exchange
  comes first. It also remembers the phase at which an exchange last wrote c: what c has decayed to
  since follows from the two phases, and no flow passes over c to write it.
* The boundary of a large model has helper threads. They work only while the main thread is in
  that boundary, so for everyone else it is the main thread that writes.

On a device that only queues work, :mod:`~gossipdp.dynamics.device` has further rules.
"""

import enum
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from gossipdp.dynamics import update
from gossipdp.dynamics.device import Device, device_of, zeros
from gossipdp.dynamics.outer import OuterStep

CHUNK_BYTES = 1 << 20
# A boundary of fewer values is over before a second thread has woken.
LEAST_HELPED_VALUES = 8_000_000
MOST_BOUNDARY_THREADS = 8  # a few take all that memory gives
# A flow that would leave less of c than this takes all of it: less is lost in any sum, and numbers
# too small for the processor's fast path are never met.
LEAST_LEFT = 2.0**-60


class Role(enum.Enum):
    """What becomes of a segment's values when workers meet."""

    TRAINED = "trained"
    """Parameters that optimizers change: exchanged, and counted in distances."""
    BUFFER = "buffer"
    """Float buffers, such as BatchNorm's statistics: exchanged by plain averaging, without c."""
    COPIED = "copied"
    """Integer buffers, and float ones with infinities from the start, such as attention masks:
    never averaged; at the end all take those of the lowest rank."""
    UNOPTIMIZED = "following"
    """Parameters of no optimizer, such as target networks: averaged when the average is made."""
    FROZEN = "frozen"
    """Parameters that nobody changes: sent once, at the start."""
    MOMENT = "moment"
    """What an optimizer keeps of trained parameters: averaged by some exchanges, never at the end.
    Each worker holds, saves and gives its own, as a part of its optimizer's state."""

    @property
    def is_exchanged(self) -> bool:
        """Whether exchanges average these values."""
        return self in (Role.TRAINED, Role.BUFFER, Role.MOMENT)

    @property
    def is_averaged(self) -> bool:
        """Whether the average of all workers is one of these values too."""
        return self in (Role.TRAINED, Role.BUFFER, Role.UNOPTIMIZED)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of ``c`` and ``pending`` for parameters of ``dtype``."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Outer(NamedTuple):
    """An outer step and its two tensors, of a chunk's length and in pending's precision.

    ``base`` is where x would be without the optimizer's steps since the last outer step; ``m`` is
    the outer momentum.
    """

    step: OuterStep
    base: Tensor
    m: Tensor


class Chunk:
    """One or more MiB of the state: the unit that is locked, sent and applied, whole or not at all.

    ``x + pending`` is "the parameters" wherever others see them. All tensors are one-dimensional
    and of one length, but pending of what is not exchanged is empty.

    Attributes:
        role: what becomes of the values.
        index: the chunk's place in the state.
        x: the parameter storage itself.
        pending: what exchanges and flow brought and the next boundary adds.
        c: the momentum as it was at ``theta_c``; None under plain averaging.
        outer: the outer step; None without one.
        num_exchanges: that this worker began, counted for the outer step alone.
        theta: the phase this chunk has been flowed to.
        theta_c: the phase at which c was written; minus infinity where there is no momentum,
            whatever c holds.
        has_pending: whether the next boundary has anything to add. Known zeros are not added: with
            no exchange, training is bitwise that of the plain loop.
        is_compiled: whether numba's loops compute here.
        lock: guards pending, c, base, m, the count, the phases and the flags; see the module.
        order: entered under the lock: what its holders queue on a device is done in their order.
    """

    def __init__(self, role: Role, x: Tensor, pending: Tensor, c: Tensor | None) -> None:
        self.role = role
        self.index = 0
        self.x = x
        self.pending = pending
        self.c = c
        self.outer: Outer | None = None
        self.num_exchanges = 0
        self.theta = 0.0
        self.theta_c = -math.inf
        self.has_pending = False
        self.is_compiled = False
        self.device = Device()
        self.lock = threading.Lock()
        self.order = self.device.order()

    @property
    def num_elements(self) -> int:
        """Number of values in the chunk."""
        return self.x.numel()

    # The main thread's part.

    def boundary(self, theta: float, *, wait: bool = False) -> bool:
        """Flow to the phase ``theta``, then x += pending; False if the chunk is in use.

        With ``wait`` the chunk is waited for instead.
        """
        taken: list[bool] = []
        try:
            # One call of C: an interrupt comes when it is known whether the lock is taken.
            taken.extend(map(self.lock.acquire, (wait,)))
            if not taken[0]:
                return False
            with self.order:
                share, _ = self._flow(theta)
                is_due = self.has_pending or share != 0.0
                update.at_once(
                    *(self._additions(share) if is_due else ()),
                    partial(setattr, self, "has_pending", False),
                    partial(setattr, self, *self._phase_at(theta)),
                )
        finally:
            if True in taken:
                self.lock.release()
        return True

    def flow(self, theta: float) -> None:
        """Flow up to the phase ``theta``, into pending; x stays. The phase never goes back."""
        with self.lock, self.order:
            share, _ = self._flow(theta)
            operations: list[Callable[[], object]] = [
                partial(setattr, self, *self._phase_at(theta))
            ]
            if share != 0.0 and self.c is not None:
                operations.append(update.flow_operation(self.pending, self.c, share))
                operations.append(partial(setattr, self, "has_pending", True))
            update.at_once(*operations)

    def forget(self, part: slice) -> None:
        """Drop all but x of a part whose values were loaded; no exchange is in flight."""
        with self.lock, self.order:
            self._forget(part)

    def restored(self) -> None:
        """Take note that x, pending and c were set to what a checkpoint holds, at phase 0."""
        self.has_pending = bool(self.pending.any())
        if self.c is not None and bool(self.c.any()):
            self.theta_c = self.theta

    # Either thread's part.

    def read(self, out: Tensor) -> None:
        """Write x + pending to ``out``, or x if the chunk is not exchanged."""
        with self.lock, self.order:
            self.device.write(self._write, out)

    def read_z(self, out: Tensor) -> None:
        """Write z to ``out``: x, pending and half of the momentum, where a joiner starts."""
        if self.c is None:
            self.read(out)
            return
        with self.lock, self.order:
            left = self._left(self.theta)
            state = self.x, self.pending, self.c
            self.device.write(lambda out: update.read_z(out, *state, left), out)

    def copy_momentum(
        self,
        pending: Tensor | None,
        c: Tensor | None,
        g: Tensor | None = None,
        m: Tensor | None = None,
    ) -> None:
        """Copy pending and momenta of one moment to host memory, for a checkpoint.

        ``g``, the optimizer's steps since the last outer step, and ``m`` are that one's; the main
        thread, which calls this, takes no step meanwhile.
        """
        with self.lock, self.order:
            if pending is not None:
                self.device.write(lambda out: out.copy_(self.pending), pending)
            if c is not None and self.c is not None:
                momentum, left = self.c, self._left(self.theta)
                self.device.write(lambda out: torch.mul(momentum, left, out=out), c)
            if g is not None and m is not None and self.outer is not None:
                _, base, velocity = self.outer
                self.device.write(lambda out: torch.sub(self.x, base, out=out), g)
                self.device.write(lambda out: out.copy_(velocity), m)

    # The gossip thread's part. Snapshots are in host memory.

    def outer_step(self) -> None:
        """Take the outer step, if one is due, before the snapshot of an exchange: once in each.

        Between the two a boundary may move pending into x, and the optimizer may step: both ends of
        the exchange use the snapshot, and what it holds of that step counts in the next outer step.
        """
        if self.outer is None:
            return
        with self.lock, self.order:
            (rule, base, m), compiled = self.outer, self.is_compiled
            self.num_exchanges += 1
            if self.num_exchanges % rule.every:
                return
            numbers = rule.momentum, rule.lr
            update.outer_step(self.x, self.pending, base, m, *numbers, compiled=compiled)
            self.has_pending = True

    def snapshot(self, theta: float, out: Tensor) -> bool:
        """Write x + pending as they are at the phase ``theta``; return whether all is finite.

        Nothing else is written: the flow itself is left to the exchange or a boundary. That changes
        no snapshot, as theta stands still meanwhile.
        """
        with self.lock, self.order:
            is_finite = self._snapshot(self.device.there(0, out), self._flow(theta)[0])
            self.device.store(0, out)
            return is_finite

    def exchange(self, theta: float, mine: Tensor, peers: Tensor, alpha_tilde: float) -> float:
        """Flow to ``theta`` and apply one exchange; return the squared norm of delta.

        Both ends compute delta from the same two (rounded) snapshots, never from a live value,
        so their deltas are exact negatives and the mean of x + c/2 is conserved. A delta that is
        not finite is not applied, nor is the flow; the norm returned is then not finite either.

        Args:
            theta: the phase at which ``mine`` was taken.
            mine: what :meth:`snapshot` wrote.
            peers: the peer's.
            alpha_tilde: the gain of the exchange on x_tilde.
        """
        with self.lock, self.order:
            there = self.device.load(0, mine), self.device.load(1, peers)
            squared_norm = self._exchange(*there, self._flow(theta), alpha_tilde)
            self._exchanged(squared_norm, theta)
            return squared_norm

    def snapshot_and_exchange(
        self, theta: float, out: Tensor, peers: Tensor, alpha_tilde: float
    ) -> float:
        """:meth:`snapshot`, whole in any case, and :meth:`exchange`, if peers' half is there."""
        with self.lock, self.order:
            there = self.device.there(0, out), self.device.load(1, peers)
            squared_norm = self._snapshot_and_exchange(*there, self._flow(theta), alpha_tilde)
            self.device.store(0, out)
            self._exchanged(squared_norm, theta)
            return squared_norm

    def replace(self, values: Tensor) -> None:
        """Make x these values and all else zero, while the main thread only waits."""
        with self.lock, self.order:
            self.x.copy_(values)
            self._reset()
            self.device.finish()

    def squared_distance(self, values: Tensor) -> float:
        """Return the squared distance of x to these values, in host memory."""
        there = self.device.load(1, values)
        return update.difference(update.scratch(self.pending), self.x, there)

    # Under the lock.

    def _additions(self, share: float) -> list[Callable[[], object]]:
        """Return what flows and adds pending to x, to be done at once."""
        base, compiled = None if self.outer is None else self.outer.base, self.is_compiled
        c = self.c
        if self.has_pending or c is None or self.x.dtype != self.pending.dtype:
            state = self.x, self.pending, c
            return update.boundary_operations(*state, share, base, compiled=compiled)
        # Pending is zero: half of the memory need not be passed over.
        both = (self.x,) if base is None else (self.x, base)
        return [update.flow_operation(values, c, share, compiled=compiled) for values in both]

    def _write(self, out: Tensor) -> None:
        if self.role.is_exchanged:
            torch.add(self.x, self.pending, out=out)
        else:
            out.copy_(self.x)

    def _snapshot(self, out: Tensor, share: float) -> bool:
        return update.snapshot(out, self.x, self.pending, self.c, share, compiled=self.is_compiled)

    def _exchange(
        self, mine: Tensor, peers: Tensor, flow: tuple[float, float], alpha_tilde: float
    ) -> float:
        numbers, compiled = (*flow, alpha_tilde), self.is_compiled
        return update.exchange(self.pending, self.c, mine, peers, *numbers, compiled=compiled)

    def _snapshot_and_exchange(
        self, out: Tensor, peers: Tensor, flow: tuple[float, float], alpha_tilde: float
    ) -> float:
        state, numbers = (self.x, self.pending, self.c), (*flow, alpha_tilde)
        compiled = self.is_compiled
        return update.snapshot_and_exchange(out, *state, peers, *numbers, compiled=compiled)

    def _flow(self, theta: float) -> tuple[float, float]:
        """The share of c that the flow to ``theta`` adds to x, and what it leaves of c."""
        left = self._left(max(theta, self.theta))
        return 0.5 * (self._left(self.theta) - left), left

    def _left(self, theta: float) -> float:
        """What is left of c at ``theta``; 0 where there is no momentum."""
        left = math.exp(-2.0 * (theta - self.theta_c))
        return left if left >= LEAST_LEFT else 0.0

    def _phase_at(self, theta: float) -> tuple[str, float]:
        """Return which phase to set to what, once the chunk has flowed to ``theta``."""
        return ("theta_c", -math.inf) if theta == math.inf else ("theta", max(self.theta, theta))

    def _exchanged(self, squared_norm: float, theta: float) -> None:
        if math.isfinite(squared_norm):
            setattr(self, *self._phase_at(theta))
            self.has_pending = True
            if self.c is not None:
                self.theta_c = self.theta

    def _forget(self, part: slice) -> None:
        self.pending[part].zero_()
        if self.c is not None:
            self.c[part].zero_()
        if self.outer is not None:
            self.outer.base[part].copy_(self.x[part])
            self.outer.m[part].zero_()

    def _reset(self) -> None:
        self._forget(slice(None))
        self.num_exchanges = 0
        self.has_pending = False
        # A worker that takes its place anew has a phase that begins anew.
        self.theta, self.theta_c = 0.0, -math.inf


class BufferChunk(Chunk):
    """A chunk of float buffers, which forward passes change between two boundaries.

    The present values are ``weight x + pending``; an exchange halves both and adds half of the
    peer's. So they lie between x, whatever the forward pass makes of it, and what peers sent: a
    running variance stays positive. While x stands still this is the plain average.
    """

    weight = 1.0

    def copy_momentum(
        self,
        pending: Tensor | None,
        c: Tensor | None,
        g: Tensor | None = None,
        m: Tensor | None = None,
    ) -> None:
        """See :class:`Chunk`: pending becomes what x lacks of the present values."""
        if pending is None:
            return
        with self.lock, self.order:
            more = self.weight - 1.0
            self.device.write(lambda p: torch.add(self.pending, self.x, alpha=more, out=p), pending)

    # Under the lock.

    def _additions(self, share: float) -> list[Callable[[], object]]:
        return [
            partial(self.pending.add_, self.x, alpha=self.weight),
            partial(self.x.copy_, self.pending),
            self.pending.zero_,  # what rounding left over would outlive an x that shrinks
            partial(setattr, self, "weight", 1.0),
        ]

    def _write(self, out: Tensor) -> None:
        torch.add(self.pending, self.x, alpha=self.weight, out=out)

    def _snapshot(self, out: Tensor, share: float) -> bool:
        self._write(out)
        return update.is_finite(out)

    def _exchange(
        self, mine: Tensor, peers: Tensor, flow: tuple[float, float], alpha_tilde: float
    ) -> float:
        only_its_norm = update.scratch(self.pending, 1)
        squared_norm = update.exchange(only_its_norm, None, mine, peers, *flow, alpha_tilde)
        if math.isfinite(squared_norm):
            self.pending.add_(peers).mul_(0.5)
            self.weight *= 0.5
        return squared_norm

    def _snapshot_and_exchange(
        self, out: Tensor, peers: Tensor, flow: tuple[float, float], alpha_tilde: float
    ) -> float:
        self._snapshot(out, flow[0])
        return self._exchange(out, peers, flow, alpha_tilde)

    def _forget(self, part: slice) -> None:
        torch.mul(self.x[part], 1.0 - self.weight, out=self.pending[part])

    def _reset(self) -> None:
        self.weight = 1.0
        super()._reset()


@dataclass
class Moment:
    """One tensor that an optimizer keeps of each parameter, such as Adam's ``exp_avg_sq``.

    Attributes:
        name: in the optimizer's state.
        period: one exchange in so many carries it.
        decay: the share of it that a step keeps (beta); 0 where the optimizer corrects no bias.
        steps: the optimizer's age t; 0: it has no such tensor yet. Written by the main thread.
        is_unsound: whether some of it could not be sent. Written by the gossip thread.
    """

    name: str
    period: int
    decay: float = 0.0
    steps: int = 0
    is_unsound: bool = False

    @property
    def mass(self) -> float:
        """What the optimizer's bias correction divides by: 1 - beta^t; 0 before its first step."""
        return 1.0 - self.decay**self.steps

    def travels_with(self, counter: int) -> bool:
        """Whether the exchange of this number carries it; both ends know the number.

        The multiples of the golden ratio, less their whole parts, are spread evenly from 0 to 1,
        and so are those of every second or third number. So where proposals are refused in a
        rhythm, and all exchanges have even numbers, one in ``period`` still carries it. The first
        ones do not. A moment of a longer period travels with those of shorter ones.

        Example:
            >>> [n for n in range(80) if n and Moment("exp_avg_sq", 16).travels_with(n)]
            [13, 34, 47, 68]
        """
        return (counter * 2_654_435_769 & 0xFFFFFFFF) * self.period < 1 << 32


class MomentChunk(BufferChunk):
    r"""A chunk of a moment, in the optimizer's own memory; averaged much as buffers are.

    Workers of different age t are averaged by what their optimizers make of a moment,
    :math:`\hat v = v / (1 - \beta^t)`. The present value of it is ``weight x / mass + pending``,
    with the mass :math:`1 - \beta^t` of the moment that it is asked for; an exchange halves both
    and adds half of the peer's. So a second moment stays positive, whatever steps the optimizer
    makes between snapshot and boundary.

    Averaged as they are, a worker at t = 20 and one at t = 400 (beta 0.999) would have steps of a
    third and of 1.4 times their size after it.

    Zeros are not averaged. A chunk sends them, and takes nothing in that exchange, where its
    optimizer has made no step, or where a value is not finite in the precision in which it travels:
    after one huge gradient a second moment is infinite for good, beside finite parameters.
    """

    def __init__(
        self, role: Role, x: Tensor, pending: Tensor, c: Tensor | None, moment: Moment
    ) -> None:
        super().__init__(role, x, pending, c)
        self._moment = moment
        self._gives = False  # in this exchange; the gossip thread's

    # Under the lock. The mass is read once each time: the main thread may change it.

    def _additions(self, share: float) -> list[Callable[[], object]]:
        mass = self._moment.mass
        if mass == 0.0:  # given up since
            return [self._reset]
        return [partial(self.pending.mul_, mass), *super()._additions(share)]

    def _write(self, out: Tensor) -> None:
        values = torch.mul(self.pending, self._moment.mass, out=update.scratch(self.pending))
        torch.add(values, self.x, alpha=self.weight, out=out)

    def _snapshot(self, out: Tensor, share: float) -> bool:
        mass = self._moment.mass
        self._gives = mass != 0.0
        if self._gives:
            torch.add(self.pending, self.x, alpha=self.weight / mass, out=out)
            self._gives = update.is_finite(out)
            self._moment.is_unsound |= not self._gives
        if not self._gives:
            out.zero_()
        return True

    def _exchange(
        self, mine: Tensor, peers: Tensor, flow: tuple[float, float], alpha_tilde: float
    ) -> float:
        """As of buffers; how far apart the two are is not worth its passes."""
        theirs = update.scratch(self.pending).copy_(peers)
        if not update.is_finite(theirs):
            return math.inf
        has_any = bool(theirs.sum()) or bool(theirs.any())  # the sum is 20 times as fast
        if has_any and self._gives:
            self.pending.add_(theirs).mul_(0.5)
            self.weight *= 0.5
        return 0.0


class Segment:
    """A run of parameters of one role, dtype, device and optimizer, in one flat tensor.

    Args:
        x: one-dimensional; the module's parameters lie in its memory.
        role: what becomes of the values when workers meet.
        momentum: whether trained values carry c (method ``a2cid2``).
        outer: the outer step of trained values.
        optimizer_index: whose boundary covers this segment.
        chunk_bytes: the size a chunk may have at most.
        moment: of what, where the role is MOMENT.
    """

    def __init__(
        self,
        x: Tensor,
        role: Role,
        *,
        momentum: bool = True,
        outer: OuterStep | None = None,
        optimizer_index: int = 0,
        chunk_bytes: int = CHUNK_BYTES,
        moment: Moment | None = None,
    ) -> None:
        if x.dim() != 1:
            raise ValueError(f"a segment is one-dimensional, not of shape {tuple(x.shape)}")
        self.x = x
        self.role = role
        self.optimizer_index = optimizer_index
        self.moment = moment
        # What is not exchanged has no pending; the empty tensor keeps the attribute's type simple.
        length = x.numel() if role.is_exchanged else 0
        # In float64 the mean of equal values is that value: what nobody moved stays.
        dtype = torch.float64 if role is Role.UNOPTIMIZED else working_dtype(x.dtype)
        self.pending = zeros(length, dtype, x.device)
        has_c = momentum and role is Role.TRAINED
        self.c = zeros(length, dtype, x.device) if has_c else None
        self.outer: Outer | None = None
        if outer is not None and role is Role.TRAINED:
            base = zeros(length, dtype, x.device).copy_(x)
            self.outer = Outer(outer, base, zeros(length, dtype, x.device))
        kind: Callable[[Role, Tensor, Tensor, Tensor | None], Chunk]
        kind = BufferChunk if role is Role.BUFFER else Chunk
        if moment is not None:
            kind = partial(MomentChunk, moment=moment)
        length = max(1, chunk_bytes // x.element_size())
        parts = [slice(start, start + length) for start in range(0, x.numel(), length)]
        self._parts = parts
        self.chunks = [
            kind(role, x[part], self.pending[part], None if self.c is None else self.c[part])
            for part in parts
        ]
        if self.outer is not None:
            rule, base, m = self.outer
            for chunk, part in zip(self.chunks, parts, strict=True):
                chunk.outer = Outer(rule, base[part], m[part])

    def lie_in(self, x: Tensor) -> None:
        """Let x be these values from now on, which are those that it had.

        While parameters lie elsewhere for a time; the main thread's.
        """
        self.x = x
        for chunk, part in zip(self.chunks, self._parts, strict=True):
            with chunk.lock, chunk.order:
                chunk.x = x[part]

    def forget(self, start: int, length: int) -> None:
        """Drop all but x of values that were loaded; see :meth:`Chunk.forget`."""
        for chunk, part in zip(self.chunks, self._parts, strict=True):
            first, end = (
                max(start, part.start),
                min(start + length, part.start + chunk.num_elements),
            )
            if first < end:
                chunk.forget(slice(first - part.start, end - part.start))

    def copy_momentum(self) -> list[Tensor | None]:
        """Copy pending (None: it is zero), c, g and m to host memory; see :class:`Chunk`."""
        _, base, m = self.outer or (None, None, None)
        held = self.pending, self.c, base, m
        copies = [None if each is None else torch.empty_like(each, device="cpu") for each in held]
        start = 0
        for chunk in self.chunks if self.role.is_exchanged else ():
            part = slice(start, start + chunk.num_elements)
            chunk.copy_momentum(*(None if copy is None else copy[part] for copy in copies))
            start = part.stop
        pending, *others = copies
        return [pending if pending is not None and pending.any() else None, *others]

    def split(self, flat: Tensor) -> Iterator[tuple[Chunk, Tensor]]:
        """Pair each chunk with its part of another tensor of this segment's length."""
        parts = torch.split(flat, [chunk.num_elements for chunk in self.chunks])
        return zip(self.chunks, parts, strict=True)


class State:
    """All segments of one worker and their chunks, in the order in which every worker has them.

    Args:
        segments: in the order of all workers.
        device: where they live, if not where torch says.
        moments: segments of what optimizers keep, in the order of all workers.

    Attributes:
        segments, moments: as given.
        chunks: those that every exchange averages; their ``index`` is their place here.
        averaged_chunks: those and the following ones, of which the average of all workers consists.
        copied_chunks: those of integer buffers, numbered on from there.
        all_chunks: everything that a worker who starts must be given, by ``index``.
        moment_chunks: those of moments, numbered on from there.
    """

    def __init__(
        self,
        segments: Iterable[Segment],
        device: Device | None = None,
        *,
        moments: Iterable[Segment] = (),
    ) -> None:
        self.segments, self.moments = list(segments), list(moments)
        chunks = [chunk for segment in self.segments for chunk in segment.chunks]
        self.chunks = [chunk for chunk in chunks if chunk.role.is_exchanged]
        following = [chunk for chunk in chunks if chunk.role is Role.UNOPTIMIZED]
        self.averaged_chunks = self.chunks + following
        self.copied_chunks = [chunk for chunk in chunks if chunk.role is Role.COPIED]
        frozen = [chunk for chunk in chunks if chunk.role is Role.FROZEN]
        self.all_chunks = self.averaged_chunks + self.copied_chunks + frozen
        self.moment_chunks = [chunk for segment in self.moments for chunk in segment.chunks]
        self.device = device or device_of({segment.x.device for segment in self.segments})
        for index, chunk in enumerate(self.all_chunks + self.moment_chunks):
            chunk.index = index
            chunk.device = self.device
            chunk.order = self.device.order()
        self._helpers: list[threading.Thread] = []
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()

    def description(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return what must agree between workers for their chunks to: a text and a shape each.

        It tells how parameters are grouped, by role and by optimizer, how they are cut, and which
        moments travel how often.
        """
        lines: list[tuple[str, tuple[int, ...]]] = []
        for index, segment in enumerate(self.segments + self.moments):
            dtype = str(segment.x.dtype).removeprefix("torch.")
            length = segment.chunks[0].num_elements if segment.chunks else 0
            role, moment = segment.role.value, segment.moment
            if moment is not None:
                role = f"{moment.name} in one exchange of {moment.period}"
            kind = f"{role}, {dtype}, of optimizer {segment.optimizer_index}"
            text = f"segment {index} ({kind}, in chunks of {length})"
            lines.append((text, (segment.x.numel(),)))
        return lines

    def carried(self, counter: int) -> Sequence[Chunk]:
        """Return the chunks that the exchange of this number averages, in order."""
        due = [
            chunk
            for segment in self.moments
            if segment.moment is not None and segment.moment.travels_with(counter)
            for chunk in segment.chunks
        ]
        return self.chunks + due if due else self.chunks

    def drop_momentum(self) -> None:
        """Hold no c, before training: where alpha_tilde is 1/2 it would stay zero."""
        for segment in self.segments:
            segment.c = None
        for chunk in self.chunks:
            chunk.c = None

    # What computes.

    def compile(self, requested: str | None = None) -> None:
        """Choose what computes exchanges, and compile it, so that no step is delayed by it.

        For the choice, and what is raised, see :func:`~gossipdp.dynamics.update.choose_kernels`.
        """
        num_values = sum(chunk.num_elements for chunk in self.chunks)
        is_compiled = update.choose_kernels(num_values, requested) == "numba"
        for chunk in self.chunks:
            chunk.is_compiled = is_compiled and update.can_compile(chunk.x)
        self.compile_for(None)
        compiled = sum(chunk.num_elements for chunk in self.chunks if chunk.is_compiled)
        if compiled >= LEAST_HELPED_VALUES:
            self._start_helpers()

    def compile_for(self, wire: torch.dtype | None) -> None:
        """Compile for snapshots of this precision (None: the parameters' own) before training."""
        for x in {chunk.x.dtype for chunk in self.chunks if chunk.is_compiled}:
            if (wire or x) in update.COMPILED_DTYPES:
                update.compile_loops(x, wire or x)

    @property
    def kernels(self) -> str:
        """What computes exchanges: ``numba``, ``torch``, or both with a comma between.

        ``torch on the device``: the parameters are not in host memory.
        """
        names = {"numba" if chunk.is_compiled else "torch" for chunk in self.chunks}
        return ", ".join(sorted(name + self.device.suffix for name in names))

    # The main thread's part.

    def boundary(
        self, theta: float, optimizer_index: int | None = None, *, wait: bool = False
    ) -> int:
        """Flow every chunk to the phase ``theta`` and add its pending; return the chunks skipped.

        Args:
            theta: the present phase.
            optimizer_index: only the chunks of that optimizer (None: all).
            wait: wait for a chunk in use instead of leaving it to the next boundary.
        """
        self.device.finish()
        chunks = [
            chunk
            for segment in self.segments + self.moments
            if segment.role.is_exchanged and optimizer_index in (None, segment.optimizer_index)
            for chunk in segment.chunks
        ]
        compiled = [chunk for chunk in chunks if chunk.is_compiled]
        if sum(chunk.num_elements for chunk in compiled) < LEAST_HELPED_VALUES:
            return sum(not chunk.boundary(theta, wait=wait) for chunk in chunks)
        others = (chunk for chunk in chunks if not chunk.is_compiled)
        skipped = sum(not chunk.boundary(theta, wait=wait) for chunk in others)
        return skipped + self._helped_boundary(compiled, theta, wait)

    def _helped_boundary(self, chunks: list[Chunk], theta: float, is_patient: bool) -> int:
        """The boundary of many compiled chunks, by as many threads as the optimizer's step has.

        A compiled loop has one thread, which reads half or less of what memory gives. All take the
        next chunk from one list: the interpreter's lock gives each chunk to one of them. The
        calling thread waits for those that have taken one, also if it was interrupted, and does
        alone what is left.
        """
        rest = iter(chunks)
        skipped: list[int] = []
        errors: list[Exception] = []

        def boundaries() -> int:
            return sum(not chunk.boundary(theta, wait=is_patient) for chunk in rest)

        def help_with(busy: threading.Lock) -> None:
            with busy:
                try:
                    skipped.append(boundaries())
                except Exception as error:
                    errors.append(error)

        all_busy = [threading.Lock() for _ in self._helpers]
        try:
            for busy in all_busy:
                self._tasks.put(partial(help_with, busy))
            skipped.append(boundaries())
        finally:
            deque(rest, maxlen=0)  # whoever takes the task up now, or later, finds nothing to do
            for busy in all_busy:
                with busy:
                    pass
        for error in errors:
            raise error
        return sum(skipped)

    def _start_helpers(self) -> None:
        """Start the helper threads of boundaries, or as many as the system gives.

        Daemons: one that waits for a task at the interpreter's end is left behind.
        """
        for _ in range(min(torch.get_num_threads(), MOST_BOUNDARY_THREADS) - 1):
            name = "gossipdp-boundary"
            helper = threading.Thread(target=_help, args=(self._tasks,), name=name, daemon=True)
            try:
                helper.start()
            except RuntimeError:
                return
            self._helpers.append(helper)

    def end_helpers(self) -> None:
        """End the helper threads: there will hardly be another boundary."""
        helpers, self._helpers = self._helpers, []
        for _ in helpers:
            self._tasks.put(None)
        for helper in helpers:
            helper.join()

    def flow(self, theta: float) -> None:
        """Flow every chunk to the phase ``theta``, into its pending; x stays."""
        self.device.finish()
        for chunk in self.chunks:
            chunk.flow(theta)


def _help(tasks: "SimpleQueue[Callable[[], object] | None]") -> None:
    while (task := tasks.get()) is not None:
        task()
