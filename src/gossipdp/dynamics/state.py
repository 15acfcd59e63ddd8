"""The (x, c) state of one worker, over flat buffers cut into chunks."""

import enum
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from gossipdp.dynamics import kernels
from gossipdp.dynamics.arithmetic import Arithmetic

DEFAULT_CHUNK_BYTES = 1 << 20


class Role(enum.Enum):
    """What becomes of a segment's values when workers meet."""

    TRAINED = "trained"
    """Parameters that optimizers change: exchanged, and counted in distances."""
    BUFFER = "buffer"
    """Float buffers, such as BatchNorm's statistics: exchanged by plain averaging, without c."""
    COPIED = "copied"
    """Integer buffers, and float ones with infinities from the start, such as attention masks:
    never averaged; at the end all take those of the lowest rank."""
    FROZEN = "frozen"
    """Parameters that nobody changes: sent once, at the start."""

    @property
    def is_exchanged(self) -> bool:
        """Whether exchanges average these values."""
        return self in (Role.TRAINED, Role.BUFFER)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the precision of ``c`` and ``pending`` for parameters of ``dtype``."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Chunk:
    """About 1 MB of the state: the unit that is locked, sent and applied, whole or not at all.

    ``x`` is the parameter storage itself, ``pending`` what exchanges and flow brought and the
    next boundary will add, ``c`` the momentum (None under plain averaging), ``theta`` the phase
    this chunk has been flowed to, ``index`` its place in the state. All tensors are
    one-dimensional views of ``num_elements``.

    A chunk knows no lock: :class:`gossipdp.runtime.shared_state.SharedState` says who may call
    what. ``x + pending`` is "the parameters" wherever others see them.
    """

    __slots__ = ("_has_momentum", "_has_pending", "c", "index", "pending", "role", "theta", "x")

    def __init__(self, role: Role, x: Tensor, pending: Tensor, c: Tensor | None) -> None:
        self.role = role
        self.index = 0
        self.x = x
        self.pending = pending
        self.c = c
        self.theta = 0.0
        # Known zeros are not added: with no exchange, training is bitwise that of the plain loop.
        self._has_pending = False
        self._has_momentum = False

    @property
    def num_elements(self) -> int:
        """Number of values in the chunk."""
        return self.x.numel()

    def flow_to(self, theta: float) -> None:
        """Flow up to the phase ``theta``, into ``pending``. The phase never goes back."""
        decay = self._decay(theta)
        if decay != 1.0 and self.c is not None:
            kernels.flow_(self.pending, self.c, decay)
            self._has_pending = True
        self._flowed_to(theta)

    def snapshot(self, out: Tensor) -> None:
        """Write x + pending to ``out``, in ``out``'s precision."""
        kernels.snapshot_(out, self.x, self.pending)

    def snapshot_at(self, theta: float, out: Tensor, arithmetic: Arithmetic) -> bool:
        """Write x + pending as they are at the phase ``theta``; return whether all is finite.

        Nothing else is written: the flow itself is done by whoever next writes the chunk, be it
        :meth:`exchange` or a boundary. That changes no snapshot, as theta stands still meanwhile.
        """
        return arithmetic.snapshot(self, out, self._decay(theta))

    def snapshot_flowed(self, out: Tensor) -> None:
        """Write x + pending + c/2 to ``out``: what takes over from this worker starts there."""
        if self.c is None:
            self.snapshot(out)
        else:
            kernels.snapshot_flowed_(out, self.x, self.pending, self.c)

    def exchange(
        self, theta: float, mine: Tensor, peers: Tensor, alpha_tilde: float, arithmetic: Arithmetic
    ) -> float:
        """Flow to ``theta`` and apply one exchange; return the squared norm of delta.

        Both ends compute delta from the same two (rounded) snapshots, never from a live value,
        so their deltas are exact negatives and the mean of x + c/2 is conserved. A delta that is
        not finite is not applied, nor is the flow; the norm returned is then not finite either.

        Args:
            theta: the phase at which ``mine`` was taken.
            mine: what :meth:`snapshot_at` wrote.
            peers: the peer's.
            alpha_tilde: the gain of the exchange on x_tilde.
            arithmetic: the calling thread's.
        """
        squared_norm = arithmetic.exchange(self, mine, peers, self._decay(theta), alpha_tilde)
        self._exchanged(squared_norm, theta)
        return squared_norm

    def snapshot_and_exchange(
        self, theta: float, out: Tensor, peers: Tensor, alpha_tilde: float, arithmetic: Arithmetic
    ) -> float:
        """:meth:`snapshot_at` and :meth:`exchange` at once, where ``peers`` is there already."""
        squared_norm = arithmetic.snapshot_and_exchange(
            self, out, peers, self._decay(theta), alpha_tilde
        )
        self._exchanged(squared_norm, theta)
        return squared_norm

    def boundary(self, theta: float, arithmetic: Arithmetic) -> None:
        """At a step boundary: flow to ``theta``, then x += pending."""
        decay = self._decay(theta)
        if self._has_pending or decay != 1.0:
            arithmetic.boundary(self, decay)
            self._has_pending = False
        self._flowed_to(theta)

    def _decay(self, theta: float) -> float:
        """What the flow to ``theta`` leaves of c; 1 where there is nothing to flow."""
        if theta <= self.theta or not self._has_momentum:
            return 1.0
        return math.exp(-2.0 * (theta - self.theta))

    def _flowed_to(self, theta: float) -> None:
        if theta == math.inf:
            self._has_momentum = False
        else:
            self.theta = max(self.theta, theta)

    def _exchanged(self, squared_norm: float, theta: float) -> None:
        if math.isfinite(squared_norm):
            self._flowed_to(theta)
            self._has_pending = True
            self._has_momentum = self.c is not None

    def restored(self) -> None:
        """Take note that x, pending and c were set to what a checkpoint holds, at phase 0."""
        self._has_pending = bool(self.pending.any())
        self._has_momentum = self.c is not None and bool(self.c.any())

    def take_over(self, values: Tensor) -> None:
        """Make x + pending another worker's ``values``, and c zero; x itself stays as it is."""
        self.reset()
        self.pending.copy_(values).sub_(self.x)
        self._has_pending = True

    def reset(self) -> None:
        """Drop pending and c: the parameters were loaded from elsewhere."""
        self.pending.zero_()
        if self.c is not None:
            self.c.zero_()
        self._has_pending = self._has_momentum = False
        self.theta = 0.0  # a worker that takes its place anew has a phase that begins anew


class Segment:
    """A run of parameters of one role, dtype, device and optimizer, in one flat tensor.

    Args:
        x: one-dimensional; the module's parameters lie in its memory.
        role: what becomes of the values when workers meet.
        momentum: whether trained values carry c (method ``a2cid2``).
        optimizer_index: whose boundary covers this segment.
        chunk_bytes: the size a chunk may have at most.
    """

    def __init__(
        self,
        x: Tensor,
        role: Role,
        *,
        momentum: bool = True,
        optimizer_index: int = 0,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        if x.dim() != 1:
            raise ValueError(f"a segment is one-dimensional, not of shape {tuple(x.shape)}")
        self.x = x
        self.role = role
        self.optimizer_index = optimizer_index
        # What is not exchanged has no pending; the empty tensor keeps the attribute's type simple.
        length = x.numel() if role.is_exchanged else 0
        self.pending = torch.zeros(length, dtype=working_dtype(x.dtype), device=x.device)
        has_c = momentum and role is Role.TRAINED
        self.c = torch.zeros_like(self.pending) if has_c else None
        length = max(1, chunk_bytes // x.element_size())
        self.chunks = [
            Chunk(
                role,
                x[start : start + length],
                self.pending[start : start + length],
                None if self.c is None else self.c[start : start + length],
            )
            for start in range(0, x.numel(), length)
        ]

    def split(self, flat: Tensor) -> Iterator[tuple[Chunk, Tensor]]:
        """Pair each chunk with its part of another tensor of this segment's length."""
        start = 0
        for chunk in self.chunks:
            yield chunk, flat[start : start + chunk.num_elements]
            start += chunk.num_elements


class State:
    """All segments of one worker and their chunks, in the order in which every worker has them.

    Attributes:
        segments: in the order given.
        chunks: those that exchanges average; their ``index`` is their place here.
        copied_chunks: those of integer buffers, numbered on from there.
        frozen_chunks: those of frozen parameters, numbered on from there.
    """

    def __init__(self, segments: Iterable[Segment]) -> None:
        self.segments = list(segments)
        chunks = [chunk for segment in self.segments for chunk in segment.chunks]
        self.chunks = [chunk for chunk in chunks if chunk.role.is_exchanged]
        self.copied_chunks = [chunk for chunk in chunks if chunk.role is Role.COPIED]
        self.frozen_chunks = [chunk for chunk in chunks if chunk.role is Role.FROZEN]
        for index, chunk in enumerate(self.all_chunks):
            chunk.index = index

    @property
    def all_chunks(self) -> list[Chunk]:
        """Everything that a worker who starts must be given, by ``index``."""
        return self.chunks + self.copied_chunks + self.frozen_chunks
