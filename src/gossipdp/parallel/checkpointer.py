"""When a worker's checkpoints are taken, what is in them, and what becomes of errors."""

import atexit
import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

import gossipdp
from gossipdp.errors import PoisonedError
from gossipdp.parallel import training_state
from gossipdp.parallel.checkpoint import (
    FORMAT,
    TRAINING_PREFIX,
    Captured,
    Resumption,
    generation_of_joiner,
    saved_by,
)
from gossipdp.parallel.checkpoint_facts import Facts
from gossipdp.parallel.checkpoint_files import GivenUpError
from gossipdp.parallel.checkpoint_writer import CheckpointWriter, Draft
from gossipdp.parallel.data_position import (
    DataPosition,
    random_states,
    restore_random_states,
)
from gossipdp.parallel.engine import Engine
from gossipdp.parallel.last_checkpoint import LastCheckpoint

logger = logging.getLogger("gossipdp")

# How long training waits for a running exchange; after that it goes on, no other exchange begins,
# and the checkpoint is taken at the first later boundary that finds none running.
WAIT_FOR_EXCHANGE_S = 1.0
# An explicit save and the last one due wait for it: exchanges that do not advance end by their own
# time-outs.
LONGEST_WAIT_S = 120.0
CLOSE_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 1.0


class Stateful(Protocol):
    """Whatever has a state to be saved: a scheduler, a GradScaler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take a state."""
        ...


class Checkpointer:
    """Takes this worker's checkpoints and restores what is not the engine's. Main thread only.

    A due checkpoint is taken at the first :meth:`take_due` after the step, which the caller makes
    where no forward pass is half way: so what the loop does after ``optimizer.step()``, such as
    stepping a scheduler, is in it.

    Args:
        engine: copies parameters, momentum and progress between two exchanges.
        optimizers: whose state is saved.
        position: of ``batches()``.
        method: of the run.
        directory: where checkpoints go by default.
        every: gradient steps from one to the next; None: only by :meth:`save`.
        keep: how many of this worker's checkpoints stay.
        resumption: what the run goes on from.
        is_joining: this worker comes into a run that goes on: the files in ``directory`` are that
            run's own, of this worker's earlier life among them, or what it was resumed from.
        resume: as the run that it comes into was given it.
    """

    def __init__(
        self,
        engine: Engine,
        optimizers: Sequence[torch.optim.Optimizer],
        position: DataPosition,
        *,
        method: str,
        directory: Path | None,
        every: int | None,
        keep: int,
        resumption: Resumption | None,
        is_joining: bool = False,
        resume: str | os.PathLike[str] | None = None,
    ) -> None:
        self.is_due = False
        self.num_saved = 0
        self.num_failed = 0
        self.pause_s = 0.0
        self._engine = engine
        self._optimizers = optimizers
        self._position = position
        self._method = method
        self._directory = directory
        self._every = every
        self._keep = keep
        self._generation = 1 if resumption is None else resumption.generation
        self._ended = () if resumption is None else resumption.ended
        self._known_directories: set[Path] = set()
        self._has_waited = False
        self._has_looked = False
        self._num_generators = 0
        self._random_states: dict[str, Any] | None = None
        self._others: dict[str, Stateful] = {}
        # What the run resumed from, until the first step.
        self._resumed: dict[str, Any] | None = None
        self._has_resumed = resumption is not None
        self._writer = CheckpointWriter(engine.rank)
        self._written: Future[Path] | None = None
        atexit.register(self.close, EXIT_TIMEOUT_S)
        self._last = None if directory is None else LastCheckpoint()
        if is_joining and directory is not None:
            self._known_directories.add(directory.resolve())
            self._generation = generation_of_joiner(directory, resume, engine.num_workers)
        if resumption is not None:
            self._known_directories.add(resumption.directory.resolve())
            self._resume(resumption)

    def _resume(self, resumption: Resumption) -> None:
        self._resumed = resumption.training
        own_file = resumption.is_own or resumption.steps > 0
        states = self._resumed["random"] if own_file else None
        self._position.resume(self._resumed["position"], states, is_own=resumption.is_own)
        if states is not None:
            restore_random_states(states)

    def register(self, others: dict[str, Stateful]) -> None:
        """Save these too from now on; give them what was saved of them, if the run resumed.

        Raises:
            ValueError: a name is taken, or the run resumed and has made a step since.
        """
        if self._has_resumed and self._resumed is None:
            raise ValueError("this run resumed: call also_checkpoint() before its first step")
        for name, stateful in others.items():
            if name in self._others:
                raise ValueError(f"{name!r} is saved with the checkpoints already")
            self._others[name] = stateful
            if self._resumed is None:
                continue
            if name in self._resumed["others"]:
                stateful.load_state_dict(self._resumed["others"][name])
            else:
                logger.warning("the checkpoint holds nothing of %r: it begins anew", name)
        if self._resumed is not None:
            training_state.restore_groups(self._resumed, self._optimizers)

    # When.

    def stepped(self) -> None:
        """A gradient step ended: a checkpoint may be due, another may have failed meanwhile."""
        self._resumed = None
        if self._written is not None and self._written.done():
            self._report()
        if not self._has_looked and self._num_generators == 0:  # a loop that goes its own way
            self.take_due()
        self._has_looked = False
        if self._every is None:
            return
        if self._engine.step_number % self._every == 0:
            self.is_due = True
        if self.is_due:
            self._random_states = random_states()

    @contextlib.contextmanager
    def of_batches(self) -> Iterator[None]:
        """While it lasts, checkpoints are taken at the end of the loop's body alone.

        A body may step several optimizers, or one several times: of a checkpoint between two of
        these the batch is done, and the rest of the body would be lost.
        """
        self._num_generators += 1
        try:
            yield
        finally:
            self._num_generators -= 1

    def take_due(self, *, finally_: bool = False, in_loop: bool = False) -> None:
        """Take the checkpoint that is due, unless the last is still being written.

        Only the first call after a step does so. Later ones may come between the forward passes
        of one step (accumulation, a closure): what that step has done so far would be lost. After
        SIGTERM too such a step goes on to its end, for as long as :class:`LastCheckpoint` waits.

        Args:
            finally_: there is no later occasion: wait for that, and for a running exchange. One
                that does not end is a checkpoint that failed.
            in_loop: the next step may have begun, with random numbers for its batch: the states
                saved are those right after the last step. Nothing is done in a loop
                :meth:`of_batches`.
        """
        if in_loop and self._num_generators > 0:
            return
        if self._last is not None and self._last.is_asked and (finally_ or not self._has_looked):
            self._save_and_end(self._last)
        has_looked, self._has_looked = self._has_looked, True
        if not self.is_due or (has_looked and not finally_):
            return
        assert self._directory is not None
        if finally_:
            self._wait_for_writer()
        elif self._written is not None and not self._written.done():
            return
        if finally_:
            wait_s = LONGEST_WAIT_S
        else:
            wait_s = 0.0 if self._has_waited else WAIT_FOR_EXCHANGE_S
        try:
            states = self._random_states if in_loop else None
            draft = self._draft(self._directory, wait_s, states)
        except PoisonedError as error:
            self.is_due = False
            self.num_failed += 1
            logger.error("%s", error)
            return
        self._has_waited = draft is None
        if draft is not None:
            self.is_due = False
            self._written = self._writer.write(draft)
        elif finally_:
            self._engine.release()
            self.is_due = False
            self.num_failed += 1
            logger.error(
                "worker %d: the last checkpoint that was due could NOT be taken: an exchange did "
                "not end within %g s. Those written before are kept",
                self._engine.rank,
                LONGEST_WAIT_S,
            )

    def _save_and_end(self, last: LastCheckpoint) -> None:
        """After SIGTERM, where training stands between two steps: save and end the process."""
        last.begin()
        try:
            path = self.save(None)
            logger.warning("worker %d: SIGTERM; saved %s", self._engine.rank, path)
        except Exception as error:  # nothing else ends the process any more
            logger.error("worker %d: SIGTERM; nothing saved: %s", self._engine.rank, error)
        last.end()

    def save(self, directory: Path | None) -> Path:
        """Take a checkpoint now and return its path when it is on the disk.

        Raises:
            ValueError: no directory, or one that holds another run's checkpoints.
            OSError: of the file system.
            PoisonedError: parameters hold NaN or infinity.
            TimeoutError: an exchange did not end.
        """
        directory = directory or self._directory
        if directory is None:
            raise ValueError("give save_checkpoint() a directory, or wrap with checkpoint_dir=")
        self._wait_for_writer()
        draft = self._draft(directory, LONGEST_WAIT_S, None)
        if draft is None:
            self._engine.release()
            raise TimeoutError(f"an exchange did not end within {LONGEST_WAIT_S:g} s")
        path = self._writer.write(draft).result()
        self.num_saved += 1
        return path

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Let the write under way end, report it, and end the thread."""
        atexit.unregister(self.close)
        if self._last is not None:
            self._last.close()
        self._writer.close(timeout_s)
        if self._written is not None and self._written.done():
            self._report()

    # What.

    def _draft(self, directory: Path, wait_s: float, states: dict[str, Any] | None) -> Draft | None:
        """Copy what a checkpoint holds; None where an exchange still runs after ``wait_s``."""
        self._check_directory(directory)
        started_s = time.perf_counter()
        try:
            captured = self._engine.capture(wait_s)
        except BaseException:
            self._engine.release()
            raise
        if captured is None:
            self.pause_s += time.perf_counter() - started_s
            return None
        try:
            state = training_state.capture(self._optimizers)
            state["position"] = self._position.capture()
            state["random"] = states or random_states()
            state["others"] = {name: each.state_dict() for name, each in self._others.items()}
            structure, tensors = training_state.pack(state, TRAINING_PREFIX)
        finally:
            self._engine.release()
            pause_s = time.perf_counter() - started_s
            self.pause_s += pause_s
        logger.info(
            "worker %d: checkpoint at step %d; training paused for %.0f ms",
            self._engine.rank,
            captured.step,
            1e3 * pause_s,
        )
        return Draft(
            directory=directory,
            rank=self._engine.rank,
            step=captured.step,
            tensors={**captured.tensors, **tensors},
            metadata={
                "format": FORMAT,
                "facts": msgspec.json.encode(self._facts(captured)).decode(),
                "structure": structure,
            },
            keep=self._keep,
        )

    def _facts(self, captured: Captured) -> Facts:
        return Facts(
            rank=self._engine.rank,
            num_workers=self._engine.num_workers,
            generation=self._generation,
            method=self._method,
            step=captured.step,
            steps=captured.steps,
            samples=captured.samples,
            progress=captured.progress,
            gossipdp=gossipdp.__version__,
            run_id=captured.run_id,
            incarnation=captured.incarnation,
            ended=(*self._ended, *captured.ended),
        )

    def _check_directory(self, directory: Path) -> None:
        """Raise ValueError for a directory that another run saved to: steps would mix."""
        resolved = directory.resolve()
        if resolved in self._known_directories:
            return
        if saved := saved_by(directory, self._engine.rank):
            raise ValueError(
                f"{directory} holds checkpoints of another run, such as {saved[0].path}; go on "
                "from them with resume='auto', or choose another directory"
            )
        self._known_directories.add(resolved)

    # Errors.

    def _wait_for_writer(self) -> None:
        if self._written is not None:
            self._written.exception()  # waits
            self._report()

    def _report(self) -> None:
        """Say how the last write ended. A file system's error is no reason to stop training."""
        assert self._written is not None
        written, self._written = self._written, None
        error = written.exception()
        if error is None:
            self.num_saved += 1
            return
        self.num_failed += 1
        if not isinstance(error, (OSError, GivenUpError)):
            raise RuntimeError("a checkpoint could not be written") from error
        reason = "the worker ended" if isinstance(error, GivenUpError) else error
        logger.error(
            "worker %d: a checkpoint could NOT be written: %s. Those written before are kept, "
            "training goes on, and the next is tried when it is due",
            self._engine.rank,
            reason,
        )
