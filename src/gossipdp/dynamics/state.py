"""The state of one worker: segments of parameters, cut into chunks, and their boundary."""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue

import torch
from torch import Tensor

from gossipdp.dynamics import update
from gossipdp.dynamics.chunks import BufferChunk, Chunk, Moment, MomentChunk, Role, working_dtype
from gossipdp.dynamics.device import Credit, Device, QueuedDevice, device_of, zeros
from gossipdp.dynamics.inboxes import InboxChunk

CHUNK_BYTES = 1 << 20
MOST_BYTES = 1 << 26
"""The largest chunk, in pending's precision: sums travel so, and a frame holds one chunk."""
# A boundary of fewer values is over before a second thread has woken.
LEAST_HELPED_VALUES = 8_000_000
MOST_BOUNDARY_THREADS = 8  # a few take all that memory gives


class Segment:
    """A run of parameters of one role, dtype, device and optimizer, in one flat tensor.

    Args:
        x: one-dimensional; the module's parameters lie in its memory.
        momentum: True if trained values carry c (method ``a2cid2``).
        optimizer_index: the optimizer whose boundary covers this segment.
        chunk_bytes: the largest size of a chunk.
        moment: the moment that these values are, if the role is MOMENT.
    """

    def __init__(
        self,
        x: Tensor,
        role: Role,
        *,
        momentum: bool = True,
        optimizer_index: int = 0,
        chunk_bytes: int = CHUNK_BYTES,
        moment: Moment | None = None,
    ) -> None:
        self.x = x
        self.role = role
        self.optimizer_index = optimizer_index
        self.moment = moment
        # Values that are not exchanged have no pending: an empty tensor, for a simple type.
        length = x.numel() if role.is_exchanged else 0
        # In float64 the mean of equal values is that value, so values that never moved stay.
        dtype = torch.float64 if role is Role.UNOPTIMIZED else working_dtype(x.dtype)
        self.pending = zeros(length, dtype, x.device)
        has_c = momentum and role is Role.TRAINED
        self.c = zeros(length, dtype, x.device) if has_c else None
        kind: Callable[[Role, Tensor, Tensor, Tensor | None], Chunk]
        kind = BufferChunk if role is Role.BUFFER else Chunk
        if moment is not None:
            kind = partial(MomentChunk, moment=moment)
        length = max(1, min(chunk_bytes // x.element_size(), MOST_BYTES // dtype.itemsize))
        self._parts = parts = [
            slice(start, start + length) for start in range(0, x.numel(), length)
        ]
        self.chunks = [
            kind(role, x[part], self.pending[part], None if self.c is None else self.c[part])
            for part in parts
        ]
        self._inboxes: tuple[Tensor, ...] = ()
        self.inbox_chunks: list[InboxChunk] = []

    def add_inbox(self) -> None:
        """Give trained values a second pending, before training; see :mod:`.inboxes`."""
        if self.role is not Role.TRAINED:
            return
        self._inboxes = self.pending, torch.zeros_like(self.pending)
        self.inbox_chunks = [
            InboxChunk(chunk.x, chunk.pending, chunk.c, self._inboxes[1][part])
            for chunk, part in zip(self.chunks, self._parts, strict=True)
        ]
        self.chunks = list[Chunk](self.inbox_chunks)

    def add_taken(self) -> None:
        """Add to x all that boundaries have taken: one pass for each run of chunks.

        Ctrl+C leaves each run as it was, for the next boundary, or added.
        """
        runs = itertools.groupby(
            zip(self.inbox_chunks, self._parts, strict=False),  # no inboxes: nothing is taken
            lambda each: (each[0].is_taken, each[0].taken_number),
        )
        for (is_taken, number), run in runs:
            chunks, parts = zip(*run, strict=True)
            part = slice(parts[0].start, parts[-1].stop)
            if is_taken:
                update.at_once(
                    *update.take_operations(self.x[part], self._inboxes[number][part]),
                    *(partial(setattr, chunk, "is_taken", False) for chunk in chunks),
                )

    def swap(self, other: Tensor) -> None:
        """Swap the values of x and ``other``, where x lies from now on; for the main thread.

        So the memory of the module's parameters holds others for a time, as in ``averaged()``. If
        x lies in ``other`` already, nothing changes.
        """
        for chunk, part in self.split(other):
            if chunk.x.data_ptr() != part.data_ptr():
                with chunk.lock, chunk.order:
                    own = chunk.x.clone()
                    update.at_once(
                        partial(chunk.x.copy_, part),
                        partial(part.copy_, own),
                        partial(setattr, chunk, "x", part),
                    )
        self.x = other

    def forget(self, start: int, length: int) -> None:
        """Reset everything but x for values that were loaded; see :meth:`.Chunk.forget`."""
        for chunk, part in zip(self.chunks, self._parts, strict=True):
            first = max(start - part.start, 0)
            end = min(start + length - part.start, chunk.num_elements)
            if first < end:
                chunk.forget(slice(first, end))

    def copy(self, theta: float = 0.0) -> tuple[Tensor, Tensor | None]:
        """Copy to host memory what :meth:`.Chunk.read` reads, x in the precision of sums."""
        dtype = working_dtype(self.x.dtype) if self.role.is_exchanged else self.x.dtype
        values = torch.empty_like(self.x, dtype=dtype, device="cpu")
        c = None if self.c is None else torch.empty_like(self.c, device="cpu")
        for chunk, part in zip(self.chunks, self._parts, strict=True):
            chunk.read(values[part], None if c is None else c[part], theta)
        return values, c

    def split(self, flat: Tensor) -> Iterator[tuple[Chunk, Tensor]]:
        """Pair each chunk with its part of another tensor of this segment's length."""
        return zip(self.chunks, (flat[part] for part in self._parts), strict=True)


class State:
    """All segments of one worker and their chunks, in the order in which every worker has them.

    Args:
        device: where they live, in place of the device that torch names.
        moments: segments of optimizers' moments, in the order of all workers too.

    Attributes:
        chunks: those that every exchange averages; their ``index`` is their place here.
        averaged_chunks: those and the unoptimized: the average of all workers consists of them.
        all_chunks: those and the copied: all that a starting worker is given, by ``index``.
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
        self.device = device or device_of({segment.x.device for segment in self.segments})
        self._credit: Credit | None = None
        if isinstance(self.device, QueuedDevice):
            self._credit = Credit(self.device)
            for segment in self.segments:
                segment.add_inbox()
        chunks = [chunk for segment in self.segments for chunk in segment.chunks]
        self.chunks = [chunk for chunk in chunks if chunk.role.is_exchanged]
        unoptimized = [chunk for chunk in chunks if chunk.role is Role.UNOPTIMIZED]
        self.averaged_chunks = self.chunks + unoptimized
        copied = [chunk for chunk in chunks if chunk.role is Role.COPIED]
        self.all_chunks = self.averaged_chunks + copied
        self.moment_chunks = [chunk for segment in self.moments for chunk in segment.chunks]
        for index, chunk in enumerate(self.all_chunks + self.moment_chunks):
            chunk.index = index
            chunk.device = self.device
            chunk.order = self.device.order()
        self._exchanged: dict[int | None, list[Segment]] = {}
        for segment in self.segments + self.moments:
            for covering in (None, segment.optimizer_index) if segment.role.is_exchanged else ():
                self._exchanged.setdefault(covering, []).append(segment)
        self._helpers: list[threading.Thread] = []
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()

    def description(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return a text and a shape for each segment; they must agree for chunks to agree.

        They hold how parameters are grouped, by role and by optimizer, how they are cut, and how
        often each moment travels.
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

    def carried(self, periods: Collection[int]) -> Sequence[Chunk]:
        """Return the chunks that an exchange averages, with the moments of these periods."""
        due = [
            chunk
            for segment in self.moments
            if segment.moment is not None and segment.moment.period in periods
            for chunk in segment.chunks
        ]
        return self.chunks + due if due else self.chunks

    def drop_momentum(self) -> None:
        """Drop c, before training: if alpha_tilde is 1/2 it would stay zero."""
        for segment in self.segments:
            segment.c = None
        for chunk in self.chunks:
            chunk.c = None

    # What computes.

    def compile(self, requested: str | None = None) -> None:
        """Choose the kernels of exchanges, and load them, so that they delay no step.

        For the choice see :func:`~gossipdp.dynamics.update.choose_kernels`.
        """
        num_values = sum(chunk.num_elements for chunk in self.chunks)
        is_compiled = update.choose_kernels(num_values, requested) == "numba"
        for chunk in self.chunks:
            chunk.is_compiled = (
                is_compiled
                and chunk.x.device.type == "cpu"
                and chunk.x.dtype in update.COMPILED_DTYPES
            )
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
        """The kernels of exchanges: ``numba``, ``torch``, or both with a comma between.

        ``torch on the device``: the parameters are not in host memory.
        """
        suffix = " on the device" if self.device.is_queued else ""
        names = {"numba" if chunk.is_compiled else "torch" for chunk in self.chunks}
        return ", ".join(sorted(name + suffix for name in names))

    # The main thread's part.

    def boundary(
        self, theta: float, optimizer_index: int | None = None, *, wait: bool = False
    ) -> int:
        """Flow every chunk to the phase ``theta`` and add its pending; return the chunks skipped.

        Args:
            optimizer_index: only the chunks of that optimizer (None: all).
            wait: wait for a chunk in use instead of leaving it for the next boundary.
        """
        segments = self._exchanged.get(optimizer_index, [])
        if self._credit is not None:
            skipped = self._queued_boundary(segments, theta, self._credit)
            if not wait:
                return skipped
        self.device.finish()
        chunks = [chunk for segment in segments for chunk in segment.chunks]
        compiled = [chunk for chunk in chunks if chunk.is_compiled]
        if sum(chunk.num_elements for chunk in compiled) < LEAST_HELPED_VALUES:
            return sum(not chunk.boundary(theta, wait=wait) for chunk in chunks)
        others = (chunk for chunk in chunks if not chunk.is_compiled)
        skipped = sum(not chunk.boundary(theta, wait=wait) for chunk in others)
        return skipped + self._helped_boundary(compiled, theta, wait)

    def _queued_boundary(self, segments: list[Segment], theta: float, credit: Credit) -> int:
        """Take what is in the inboxes; wait for the step only for what has none, and is due."""
        inboxes = [chunk for segment in segments for chunk in segment.inbox_chunks]
        filled = [chunk for chunk in inboxes if chunk.is_filled]
        plain = [segment for segment in segments if not segment.inbox_chunks]
        due = [chunk for segment in plain for chunk in segment.chunks if chunk.has_pending]
        if not filled:  # an exchange would do their flow
            due += [chunk for chunk in inboxes if chunk.is_due(theta)]
        skipped = 0
        if due:
            self.device.finish()
            skipped = sum(not chunk.boundary(theta) for chunk in due)
        if filled:
            with credit:
                skipped += sum(not chunk.take() for chunk in filled)
                credit.device.follow_gossip()
                for segment in segments:
                    segment.add_taken()
        return skipped

    def _helped_boundary(self, chunks: list[Chunk], theta: float, is_patient: bool) -> int:
        """Do the boundary of many compiled chunks, with as many threads as the optimizer's step.

        A compiled loop has one thread, which uses at most half of the memory's speed. All threads
        take the next chunk from one list: the interpreter's lock gives each chunk to one of them.
        The calling thread waits for those that have taken one, also if it was interrupted, and
        does the rest alone.
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
            deque(rest, maxlen=0)  # a thread that takes the task up from now on finds no chunk
            for busy in all_busy:
                with busy:
                    pass
        for error in errors:
            raise error
        return sum(skipped)

    def _start_helpers(self) -> None:
        """Start the helper threads of boundaries, or as many as the system gives.

        They are daemons: one that waits for a task at the interpreter's end is left behind.
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
        """End the helper threads: another boundary is unlikely, and would do without them."""
        helpers, self._helpers = self._helpers, []
        for _ in helpers:
            self._tasks.put(None)
        for helper in helpers:
            helper.join()


def _help(tasks: "SimpleQueue[Callable[[], object] | None]") -> None:
    while (task := tasks.get()) is not None:
        task()
