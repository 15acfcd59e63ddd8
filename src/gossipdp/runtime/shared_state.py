"""The one room in which the training thread and the gossip thread meet: the state and its locks.

Who may do what, and why nothing is lost:

* ``x`` is written by the main thread only (optimizer, boundary, loading), or by the gossip thread
  while the main thread does nothing but wait for it: at the start, in ``consolidate``, and where
  poisoned parameters are replaced. The
  gossip thread reads x for a snapshot without stopping the optimizer: a snapshot torn by a
  running step is harmless, because both ends of the exchange use that same snapshot.
* ``pending``, ``c`` and a chunk's ``theta`` are written under that chunk's lock: by the gossip
  thread when it applies, by the main thread at a boundary.
* The boundary only *tries* the lock. A chunk in use keeps its pending for the next boundary, so
  training never waits for a thread of lower priority.
* A lock is held for one pass over one chunk, never across I/O and never two at a time. So there
  is no order to respect and nothing to deadlock.
* Between a chunk's snapshot and the arrival of the peer's chunk the lock is free, and a boundary
  may flow the chunk and move pending into x. That changes neither x + pending at the phase of the
  exchange nor delta, which is computed from the stored snapshots. The snapshot itself writes
  nothing: each chunk remembers the phase it has been flowed to, so the flow is done once, by the
  boundary or with the exchange, whichever comes first.
* ``phase`` is read and changed under ``_phase_lock``. An exchange freezes theta at or after every
  value that a boundary has read; a boundary that read an older value finds the chunk's theta ahead
  of it and flows nothing. So every chunk sees the same flow between two exchanges.

Taking over another's parameters (:meth:`SharedState.take_over`), while the main thread trains on:

* The gossip thread sets pending = values - x and c = 0, chunk by chunk, and leaves x alone. So it
  does not matter whether ``optimizer.step`` runs meanwhile: of each element either the old or the
  new value is read, and what the step adds after that is added to the values taken over, as any
  step is. A gradient taken before is applied a step late, as asynchronous training does anyway.
* No exchange runs, and none begins, until all chunks are there: no mixture of two workers is ever
  sent. A boundary in between may show the main thread such a mixture for one step or two; both
  parts are parameters of the same run.
* A checkpoint waits for the end of it (``GossipLoop.pause``).
* ``load_state_dict`` meanwhile ends it: what is loaded stands, whole (``GossipLoop.hold``).
* The giver dies in the middle: the chunks taken over stay, the next giver's overwrite them. With
  nobody left, the worker goes on with both, which is no worse than what it held.
* ``consolidate`` meanwhile: the averaging begins when it has ended.
* Poisoned parameters cannot be added to, so x itself is written (:meth:`SharedState.replace`),
  while the main thread waits, at a boundary or before it averages.

All this holds where an operation is done when its call returns. What else it takes on a device
that only queues them stands in :mod:`~gossipdp.runtime.queued_device`.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from gossipdp.dynamics.arithmetic import choose_arithmetic
from gossipdp.dynamics.phase import Phase
from gossipdp.dynamics.state import Chunk, Role, State
from gossipdp.runtime.clock import since_boot_s
from gossipdp.runtime.device import Device, device_of
from gossipdp.runtime.workbench import Workbench

logger = logging.getLogger(__name__)


def requested_kernels() -> str:
    """Return what the user asked to compute with."""
    return os.environ.get("GOSSIPDP_KERNELS") or "auto"


class SharedState:
    """The (x, c) state with its locks; see the module's text for the rules.

    What computes the exchanges is chosen here, once: numba's compiled loops where numba is
    installed and the model is large enough to gain by them, else torch; the variable
    GOSSIPDP_KERNELS (auto, numba or torch) decides otherwise. Compiling, or loading what an
    earlier process has compiled, is done here too, so that no step is ever delayed by it.

    Args:
        state: the chunks.
        phase: this worker's phase.
        clock: seconds, monotonic.
        kernels: what computes, instead of what GOSSIPDP_KERNELS says.
        device: where the chunks live, if not where torch says.

    Attributes:
        sums: by a chunk's index, in host memory: what consolidation adds up, and its result.

    Raises:
        ValueError: GOSSIPDP_KERNELS is none of those, or numba and that is not installed.
    """

    def __init__(
        self,
        state: State,
        phase: Phase,
        clock: Callable[[], float] = since_boot_s,
        kernels: str | None = None,
        device: Device | None = None,
    ) -> None:
        self.state = state
        self._phase = phase
        self._clock = clock
        self._phase_lock = threading.Lock()
        self._device = device or device_of(state)
        self._locks = [self._device.lock() for _ in state.chunks]
        self.sums: list[Tensor] = []
        self._exchange_theta = 0.0
        num_values = sum(chunk.num_elements for chunk in state.chunks)
        requested = kernels or requested_kernels()
        name = choose_arithmetic(requested, num_values)
        try:
            self._gossip = Workbench(state, name, self._device)
        except ImportError as error:  # such as a numba that is too old for this numpy
            if requested != "auto":
                raise
            logger.warning("exchanges are computed by torch: numba cannot be imported: %s", error)
            name = "torch"
            self._gossip = Workbench(state, name, self._device)
        self._main = Workbench(state, name, self._device)
        self.prepare()

    @property
    def kernels(self) -> str:
        """What computes the exchanges: ``numba``, ``torch``, or both with a comma between.

        ``torch on the device``: the parameters are not in host memory.
        """
        return ", ".join(sorted(self._gossip.names))

    def prepare(self, wire: torch.dtype | None = None) -> None:
        """Compile for snapshots of the precision ``wire``; by default that of the parameters.

        Only for another precision does anyone need to call this; before training, as it takes a
        second or two where numba computes.
        """
        started_s = time.perf_counter()
        self._gossip.prepare(wire)
        logger.debug(
            "exchanges are computed by %s, ready after %.2f s",
            self.kernels or "nothing",
            time.perf_counter() - started_s,
        )

    # Either thread's part.

    def read(self, chunk: Chunk, out: Tensor) -> None:
        """Write x + pending of one chunk to ``out``."""
        with self._locks[chunk.index]:
            self._device.write(chunk.snapshot, out)

    def read_flowed(self, chunk: Chunk, out: Tensor) -> None:
        """Write x + pending + c/2 of one chunk to ``out``: what another takes over."""
        with self._locks[chunk.index]:
            self._device.write(chunk.snapshot_flowed, out)

    # The main thread's part.

    def rest(self) -> None:
        """Return when all that this thread did to the state is done: others may now write x."""
        self._device.finish()

    def boundary(self, optimizer_index: int | None = None, *, wait: bool = False) -> int:
        """Flow every chunk to the current phase and add its pending; return the chunks skipped.

        Args:
            optimizer_index: only the chunks of that optimizer (None: all).
            wait: wait for a chunk in use instead of leaving it to the next boundary.
        """
        self._device.finish()
        with self._phase_lock:
            theta = self._phase.at(self._clock())
        return self._add_pending(theta, optimizer_index, wait)

    def _add_pending(self, theta: float, optimizer_index: int | None, wait: bool) -> int:
        skipped = 0
        for segment in self.state.segments:
            if optimizer_index is not None and segment.optimizer_index != optimizer_index:
                continue
            for chunk in segment.chunks if segment.role.is_exchanged else ():
                lock = self._locks[chunk.index]
                if not lock.acquire(blocking=wait):
                    skipped += 1
                    continue
                try:
                    chunk.boundary(theta, self._main.of(chunk))
                finally:
                    lock.release()
        return skipped

    def flow_to_now(self) -> None:
        """Flow every chunk to the current phase, into its pending; x stays."""
        self._device.finish()
        with self._phase_lock:
            theta = self._phase.at(self._clock())
        for chunk in self.state.chunks:
            with self._locks[chunk.index]:
                chunk.flow_to(theta)

    def reset(self) -> None:
        """Drop pending and c everywhere, after the parameters were loaded from elsewhere.

        The caller has stopped the exchange in flight: its remaining chunks would be applied to
        parameters their snapshots were not taken from.
        """
        self._device.finish()
        for chunk in self.state.chunks:
            with self._locks[chunk.index]:
                chunk.reset()

    # The gossip thread's part.

    def gossip_thread(self) -> AbstractContextManager[object]:
        """The gossip thread does all its work within this."""
        return self._device.gossip_thread()

    def read_as_it_is(self, chunk: Chunk, out: Tensor) -> None:
        """Write x of a chunk that is not exchanged to ``out``, in host memory."""
        out.copy_(chunk.x)
        self._device.finish()

    def start_exchange(self) -> float:
        """Freeze the phase for one exchange and return it."""
        with self._phase_lock:
            self._exchange_theta = self._phase.start_exchange(self._clock())
            return self._exchange_theta

    def end_exchange(self) -> None:
        """Let the phase go on."""
        with self._phase_lock:
            self._phase.end_exchange(self._clock())

    def set_speed(self, eta: float, worker_rate: float) -> None:
        """Change the speed of the phase from now on, for a new graph."""
        with self._phase_lock:
            self._phase.set_speed(eta, worker_rate, self._clock())

    def snapshot(self, chunk: Chunk, theta: float, out: Tensor) -> bool:
        """Write x + pending of one chunk at the phase ``theta``; return whether all is finite."""
        with self._locks[chunk.index]:
            return chunk.snapshot_at(theta, out, self._gossip.of(chunk))

    def take_over(self, chunk: Chunk, values: Tensor) -> None:
        """Make x + pending of one chunk ``values``, and c zero, while the main thread trains on.

        x itself is left to the main thread: a step that is running meanwhile, or whose gradient
        was taken before, is added to ``values`` as any step is. Copied chunks stay as they are.
        """
        if not chunk.role.is_exchanged:
            return
        with self._locks[chunk.index]:
            chunk.take_over(values)

    def replace(self, chunk: Chunk, values: Tensor) -> None:
        """Make x of one chunk ``values``, pending and c zero, while the main thread waits.

        At the start, when joining, and in place of poisoned values, to which nothing can be added.
        """
        if not chunk.role.is_exchanged:
            chunk.x.copy_(values)
        else:
            with self._locks[chunk.index]:
                chunk.reset()
                chunk.x.copy_(values)
        self._device.finish()

    def exchange(self, chunk: Chunk, mine: Tensor, peers: Tensor, alpha_tilde: float) -> float:
        """Apply one exchanged chunk; return the squared norm of the difference.

        ``mine`` was taken at the phase of the exchange under way. A norm that is not finite says
        that the difference was not, and that nothing was applied.
        """
        theta = self._exchange_theta
        with self._locks[chunk.index]:
            return chunk.exchange(theta, mine, peers, alpha_tilde, self._gossip.of(chunk))

    def snapshot_and_exchange(
        self, chunk: Chunk, out: Tensor, peers: Tensor, alpha_tilde: float
    ) -> float:
        """Write the snapshot of one chunk and apply the exchange, in one pass over memory.

        For a chunk whose peer's half was there before ours was taken. Returned as by
        :meth:`exchange`; ``out`` is written whole in either case, to tell whose poison it was.
        """
        theta = self._exchange_theta
        with self._locks[chunk.index]:
            return chunk.snapshot_and_exchange(
                theta, out, peers, alpha_tilde, self._gossip.of(chunk)
            )

    # The gossip thread's part while the main thread waits.

    def flow_to_the_end(self) -> None:
        """Set x to x + pending + c/2 and c to zero: what consolidation averages."""
        self._add_pending(math.inf, None, wait=True)

    def start_sums(self) -> None:
        """Set ``sums`` to x, where consolidation begins; pending lends its memory, if it can."""
        if not self.sums:
            chunks = self.state.chunks
            self.sums = [self._device.in_host_memory(chunk.pending) for chunk in chunks]
        for chunk, total in zip(self.state.chunks, self.sums, strict=True):
            total.copy_(chunk.x)
        self._device.finish()

    def squared_distance_to_sums(self) -> float:
        """Return the squared distance of the trained parameters x to ``sums``."""
        total = 0.0
        for chunk in self.state.chunks:
            if chunk.role is Role.TRAINED:
                sums = self.sums[chunk.index]
                total += self._gossip.of(chunk).squared_distance(chunk.x, sums)
        return total

    def adopt_sums(self) -> None:
        """X = sums, which hold the result; it stays there for who may yet ask for it."""
        for chunk, total in zip(self.state.chunks, self.sums, strict=True):
            chunk.x.copy_(total)
        self._device.finish()

    def copied_values(self) -> dict[int, Tensor]:
        """Copy the chunks that are never averaged to host memory, by index."""
        copies = {chunk.index: chunk.x.to("cpu", copy=True) for chunk in self.state.copied_chunks}
        self._device.finish()
        return copies

    def adopt_copied(self, values: Mapping[int, Tensor]) -> None:
        """Take over chunks that are never averaged, by index."""
        for chunk in self.state.copied_chunks:
            chunk.x.copy_(values[chunk.index])
        self._device.finish()
