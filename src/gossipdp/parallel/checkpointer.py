"""The moments at which a worker takes checkpoints, their writer, and its errors."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from gossipdp.errors import PoisonedError, SupersededError
from gossipdp.parallel import training_state
from gossipdp.parallel.checkpoint import encode, file_path, saved_by
from gossipdp.parallel.checkpoint_files import in_use, remove_unfinished, write_tensors
from gossipdp.parallel.data_position import DataPosition, random_states, restore_random_states
from gossipdp.parallel.entry import Entry
from gossipdp.parallel.packing import check_savable
from gossipdp.parallel.termination import TERMINATION
from gossipdp.rules import grace_s

logger = logging.getLogger("gossipdp")

LOOK_EVERY_S = 1.0

Write: TypeAlias = Callable[[Callable[[], None]], Path]


class BackgroundWriter:
    """A thread for one write at a time, which goes on as long as bytes reach the disk.

    A write that stands still for GOSSIPDP_GRACE_S fails with TimeoutError. Its thread may hang in
    the kernel: until it has ended, further writes fail too.
    """

    def __init__(self, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock = f"gossipdp-checkpoint-{rank}", clock
        self._grace_s, self._advanced_s, self._hangs = grace_s(), 0.0, False
        self._thread: threading.Thread | None = None

    def begin(self, write: Write) -> "Future[Path]":
        """Begin to write; the future gets the path or the error. The last write must have ended."""
        written: Future[Path] = Future()
        self.close()
        if self._thread is not None and self._thread.is_alive():
            self.has_ended(written)  # it still stands still
            return written

        def advance() -> None:
            if written.done():
                raise TimeoutError
            self._advanced_s = self._clock()

        def run() -> None:
            with contextlib.suppress(futures.InvalidStateError):  # it was given up
                try:
                    written.set_result(write(advance))
                except Exception as error:
                    written.set_exception(error)

        self._hangs, self._advanced_s = False, self._clock()
        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()
        return written

    def has_ended(self, written: "Future[Path]") -> bool:
        """Return whether a write has ended; one that stands still for too long ends here."""
        if self._clock() - self._advanced_s >= self._grace_s:
            text = f"nothing has reached the disk for {self._grace_s:g} s"
            with contextlib.suppress(futures.InvalidStateError):  # it has ended
                written.set_exception(TimeoutError(text))
                self._hangs = True
        return written.done()

    def wait(self, written: "Future[Path]") -> None:
        while not self.has_ended(written):
            TERMINATION.still_saves()
            futures.wait([written], LOOK_EVERY_S)

    def close(self) -> None:
        """Wait for the thread, whose write has ended, unless it hangs."""
        if self._thread is not None and not self._hangs:
            self._thread.join()


class Stateful(Protocol):
    """An object with a state to save: a scheduler, a GradScaler."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class Checkpointer:
    """A worker's checkpoints, and the states in them that are not the parameters'.

    Main thread only. A due checkpoint is taken at the first occasion after its step when no forward
    pass is half way: between two batches of :meth:`of_batches`; in a loop of the user's own, when
    the next forward pass begins. So it holds the effects of everything that the loop does after
    ``optimizer.step()``, such as stepping a scheduler. Later occasions may come between the forward
    passes of one step (accumulation, a closure): a checkpoint there would lose the part of that
    step that is done. So even after SIGTERM such a step goes on to its end, for as long as
    :class:`~.termination.Termination` waits. If a checkpoint comes due while the last is still
    being written, it is taken after that; with shards, training waits for the write.
    """

    def __init__(
        self, worker: Entry, position: DataPosition, capture: Callable[[], dict[str, Tensor]]
    ) -> None:
        self._worker, self._position, self._capture = worker, position, capture
        self._saving = saving = worker.options.checkpoints
        self._directory = None if saving.directory is None else Path(saving.directory)
        self._is_sharded, resumption = worker.replica.is_sharded, worker.resumption
        self.is_due = self.is_at_end = self._has_looked = False
        self._num_saved = self._num_failed = self._num_generators = 0
        self._drafted_step = 0 if resumption is None else resumption.counts.step
        self._pause_s = 0.0
        # The random states right after the last step at whose end a checkpoint was due.
        self._random_states: dict[str, Any] | None = None
        self._others: dict[str, Stateful] = {}
        self.newest: Path | None = None
        self._writer = BackgroundWriter(worker.rank)
        self._written: Future[Path] | None = None
        self._in_use = contextlib.ExitStack()
        if self._directory is not None:
            self._in_use.enter_context(in_use(self._directory, worker.run_id))
            TERMINATION.add(self)
        if resumption is not None:
            has_own_file = resumption.is_own or resumption.counts.steps > 0
            states = resumption.training["random"] if has_own_file else None
            position.resume(resumption.training["position"], states, is_own=resumption.is_own)
            if states is not None:
                restore_random_states(states)

    def register(self, others: dict[str, Stateful]) -> None:
        """Save these too from now on; see ``GossipDataParallel.also_checkpoint``."""
        resumption = self._worker.resumption
        resumed = None if resumption is None else resumption.training
        if resumption is not None and resumed is None:
            raise ValueError("this run resumed: call also_checkpoint() before its first step")
        for name, stateful in others.items():
            if name in self._others:
                raise ValueError(f"{name!r} is saved with the checkpoints already")
            if self._directory is not None:
                check_savable(
                    stateful.state_dict(), repr(name), "let its state_dict() leave it out"
                )
            self._others[name] = stateful
            if resumed is None:
                continue
            if name in resumed["others"]:
                stateful.load_state_dict(resumed["others"][name])
            else:
                logger.warning("the checkpoint holds nothing of %r: it starts afresh", name)
        # A schedule sets rates when it is made or loaded; whatever else the script has set stays.
        has_rates = any(
            hasattr(each, "optimizer") or hasattr(each, "optimizers") for each in others.values()
        )
        if resumed is not None and has_rates:
            training_state.restore_groups(resumed, self._worker.optimizers)

    def counts(self) -> dict[str, float]:
        """Return what :class:`~.counters.Counters` says of checkpoints. Any thread may call it."""
        return {
            "checkpoints": self._num_saved,
            "checkpoints_failed": self._num_failed,
            "checkpoint_pause_seconds": self._pause_s,
        }

    # The moments.

    def stepped(self) -> None:
        """Note the end of a gradient step, and whether a checkpoint is due now."""
        if self._worker.resumption is not None:
            self._worker.resumption.training = None  # on a card a second copy of the state
        if self._is_written:
            self._wait_for_writer()
        if not self.is_within_batches:  # a loop that calls neither the wrapper nor batches()
            self.take_due()
        self._has_looked = False
        every = self._saving.every_steps
        if every is not None and self._worker.step_number % every == 0:
            self.is_due = True
        if self.is_due:
            self._random_states = random_states()

    @contextlib.contextmanager
    def of_batches(self) -> Iterator[None]:
        """Take checkpoints, within this context, only at the end of the loop's body.

        A body may step several optimizers, or one several times. A checkpoint between two of these
        steps would count the batch as done, and a resumed run would skip the rest of the body.
        """
        self._num_generators += 1
        try:
            yield
        finally:
            self._num_generators -= 1

    def at_forward(self) -> None:
        """Take the checkpoint that is due, with the random states right after the last step.

        The next step may have begun and drawn random numbers for its batch.
        """
        if not self.is_within_batches:
            self.take_due(self._random_states)

    def take_due(self, states: dict[str, Any] | None = None) -> None:
        """Take the checkpoint that is due, unless the last is still being written.

        ``states``: of the random generators; None: the present ones.
        """
        if self._has_looked:
            return
        self._has_looked = True
        if self._worker.known().is_ending and TERMINATION.may_end_in(self):
            self._worker.forget_ending()
            TERMINATION.save_and_end()
        if self.is_due and self._is_sharded:  # all processes of a replica save the same steps
            self._wait_for_writer()
        if not self.is_due or not self._is_written:
            return
        self.is_due = False
        try:
            write = self._draft(states)
        # Poison, a state that cannot be saved, a rank that was taken: the next step takes another.
        except (PoisonedError, SupersededError, ValueError) as error:
            self._num_failed += 1
            logger.error("%s", error)
            return
        self._wait_for_writer()
        self._written = self._writer.begin(write)

    def take_last(self, *, is_averaged: bool = False) -> None:
        """Take a last checkpoint if there is a directory: a later start then finds the run ended.

        It is taken before the average and again after it, so that this start finds the average.
        """
        self._wait_for_writer()
        self._has_looked = False
        has_stepped = self._worker.step_number > self._drafted_step
        if self._directory is not None and (has_stepped or is_averaged):
            self.is_due = True
        self.take_due()
        self.is_at_end = True

    @property
    def rank(self) -> int:
        return self._worker.rank

    @property
    def place(self) -> tuple[int, str]:
        """Return the worker's step, and the directory in which its script saves."""
        assert self._directory is not None
        given = self._directory.parent if self._is_sharded else self._directory
        return self._worker.step_number, str(given)

    @property
    def _is_written(self) -> bool:
        return self._written is None or self._writer.has_ended(self._written)

    @property
    def is_within_batches(self) -> bool:
        """Return whether a loop of ``batches()`` or ``epochs()`` runs; see :meth:`of_batches`."""
        return self._num_generators > 0

    def begin_save(self) -> "Future[Path]":
        """Take a checkpoint now, for :meth:`finish_save`."""
        if self._directory is None:
            raise ValueError("there is no directory: wrap with checkpoints=Checkpoints(directory)")
        self._wait_for_writer()
        return self._writer.begin(self._draft(None))

    def finish_save(self, written: "Future[Path]") -> Path:
        """Return the path of a checkpoint when it is on the disk, or raise its error."""
        self._writer.wait(written)
        self.newest = path = written.result()
        self._num_saved += 1
        return path

    def close(self) -> None:
        """Wait for the write under way, report it, and end the thread; take no checkpoint later."""
        self.is_due = False
        try:
            self._wait_for_writer(is_last=True)
            self._writer.close()
        finally:
            self._in_use.close()
            TERMINATION.remove(self)

    # The content.

    def _draft(self, states: dict[str, Any] | None) -> Write:
        assert self._directory is not None
        started_s = time.perf_counter()
        captured, facts = self._capture(), self._worker.facts()
        self._drafted_step = facts.step
        state = {
            **training_state.capture(self._worker.optimizers),
            "position": self._position.capture(),
            "random": states or random_states(),
            "others": {name: each.state_dict() for name, each in self._others.items()},
        }
        tensors, metadata = encode(captured, facts, state)
        pause_s = time.perf_counter() - started_s
        self._pause_s += pause_s
        text = "worker %d: checkpoint at step %d; training paused for %.0f ms"
        logger.info(text, facts.rank, facts.step, 1e3 * pause_s)
        directory, keep = self._directory, self._saving.keep
        path = file_path(directory, facts.rank, facts.step)

        def write(advance: Callable[[], None]) -> Path:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_unfinished(path.parent)
            write_tensors(path, tensors, metadata, advance)  # whole on the disk
            # A damaged file counts for none, and was named when the run began.
            for saved in saved_by(directory, facts.rank, warns=False)[keep:]:
                if saved.step != facts.step:
                    file_path(directory, facts.rank, saved.step).unlink(missing_ok=True)
            return path

        return write

    # Errors.

    def _wait_for_writer(self, *, is_last: bool = False) -> None:
        """Wait for the write under way and report it, if there is one.

        Raises:
            RuntimeError: it failed, and the error is not the file system's.
        """
        if self._written is None:
            return
        self._writer.wait(self._written)
        written, self._written = self._written, None
        try:
            self.finish_save(written)
        except OSError as error:
            self._num_failed += 1
            if is_last:
                TERMINATION.fail(self, error)
                return
            logger.error(
                "worker %d: a checkpoint could NOT be written to %s: %s. Those written before are "
                "kept, training goes on, and the next is tried when it is due",
                self._worker.rank,
                self.place[1],
                error,
            )
        except Exception as error:
            self._num_failed += 1
            raise RuntimeError("a checkpoint could not be written") from error
