"""When a worker's checkpoints are taken, who writes them, and what becomes of errors."""

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

import gossipdp
from gossipdp.errors import PoisonedError
from gossipdp.parallel import training_state
from gossipdp.parallel.checkpoint import (
    PathLike,
    Resumption,
    encode,
    file_path,
    generation_of_joiner,
    saved_by,
)
from gossipdp.parallel.checkpoint_facts import Facts
from gossipdp.parallel.checkpoint_files import (
    GivenUpError,
    IsGivenUp,
    remove_unfinished,
    write_tensors,
)
from gossipdp.parallel.data_position import (
    DataPosition,
    random_states,
    restore_random_states,
)
from gossipdp.parallel.engine import Engine
from gossipdp.parallel.termination import Termination

logger = logging.getLogger("gossipdp")

CLOSE_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is in memory and to be written."""

    directory: Path
    rank: int
    step: int
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    keep: int


def write(draft: Draft, is_given_up: IsGivenUp = lambda: False) -> Path:
    """Write one checkpoint, and only then remove those beyond the newest ``keep``.

    Raises:
        OSError: of the file system; what was there before is there still.
        GivenUpError: ``is_given_up()`` said so.
    """
    path = file_path(draft.directory, draft.rank, draft.step)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_unfinished(path.parent)
    write_tensors(path, draft.tensors, draft.metadata, is_given_up)
    for saved in saved_by(draft.directory, draft.rank)[draft.keep :]:
        if saved.path != path:
            saved.path.unlink(missing_ok=True)
    return path


class BackgroundWriter:
    """Writes one draft at a time, in a thread of its own."""

    def __init__(self, rank: int) -> None:
        self._name = f"gossipdp-checkpoint-{rank}"
        self._given_up = threading.Event()
        self._thread: threading.Thread | None = None

    def write(self, draft: Draft) -> "Future[Path]":
        """Begin to write; the future gets the path or the error. The one before has ended."""
        written: Future[Path] = Future()

        def run() -> None:
            try:
                written.set_result(write(draft, self._given_up.is_set))
            except Exception as error:
                written.set_exception(error)

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()
        return written

    def close(self, timeout_s: float) -> None:
        """Wait for the write under way; one that takes longer than ``timeout_s`` is given up."""
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._given_up.set()
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("a checkpoint is still being written; what was there before it stays")


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
    stepping a scheduler, is in it. One that comes due while the last is still being written is
    taken when that is done.

    Args:
        engine: copies parameters, momentum and progress.
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

    make_writer: ClassVar[Callable[[int], BackgroundWriter]] = BackgroundWriter
    """For tests that order events: makes the writer of a rank."""

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
        resume: PathLike | None = None,
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
        self._has_looked = False
        self._num_generators = 0
        self._random_states: dict[str, Any] | None = None
        self._others: dict[str, Stateful] = {}
        # What the run resumed from, until the first step.
        self._resumed: dict[str, Any] | None = None
        self._has_resumed = resumption is not None
        self._writer = type(self).make_writer(engine.rank)
        self._written: Future[Path] | None = None
        self._termination = None if directory is None else Termination()
        if is_joining and directory is not None:
            self._known_directories.add(directory.resolve())
            self._generation = generation_of_joiner(directory, resume, engine.world_size)
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
        if self._every is not None and self._engine.step_number % self._every == 0:
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
        SIGTERM too such a step goes on to its end, for as long as :class:`Termination` waits.

        Args:
            finally_: there is no later occasion: wait for the last to be written.
            in_loop: the next step may have begun, with random numbers for its batch: the states
                saved are those right after the last step. Nothing is done in a loop
                :meth:`of_batches`.
        """
        if in_loop and self._num_generators > 0:
            return
        has_looked, self._has_looked = self._has_looked, True
        if has_looked and not finally_:
            return
        if self._termination is not None and self._termination.is_asked:
            self._save_and_end(self._termination)
        if finally_:
            self._wait_for_writer()
        if not self.is_due or (self._written is not None and not self._written.done()):
            return
        assert self._directory is not None
        self.is_due = False
        try:
            draft = self._draft(self._directory, self._random_states if in_loop else None)
        except PoisonedError as error:
            self.num_failed += 1
            logger.error("%s", error)
            return
        if self._written is not None:
            self._report()
        self._written = self._writer.write(draft)

    def _save_and_end(self, termination: Termination) -> None:
        """After SIGTERM, where training stands between two steps: save and end the process."""
        termination.begin()
        try:
            path = self.save(None)
            logger.warning("worker %d: SIGTERM; saved %s", self._engine.rank, path)
        except Exception as error:  # nothing else ends the process any more
            logger.error("worker %d: SIGTERM; nothing saved: %s", self._engine.rank, error)
        raise SystemExit(128 + signal.SIGTERM)

    def save(self, directory: Path | None) -> Path:
        """Take a checkpoint now and return its path when it is on the disk.

        Raises:
            ValueError: no directory, or one that holds another run's checkpoints.
            OSError: of the file system.
            PoisonedError: parameters hold NaN or infinity.
        """
        directory = directory or self._directory
        if directory is None:
            raise ValueError(
                "give save_checkpoint() a directory, or wrap with checkpoints=Checkpoints(...)"
            )
        self._wait_for_writer()
        path = self._writer.write(self._draft(directory, None)).result()
        self.num_saved += 1
        return path

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Let the write under way end, report it, and end the thread."""
        if self._termination is not None:
            self._termination.close()
        self._writer.close(timeout_s)
        if self._written is not None and self._written.done():
            self._report()

    # What.

    def _draft(self, directory: Path, states: dict[str, Any] | None) -> Draft:
        """Copy what a checkpoint holds; ``states``: of the random generators, None: as now."""
        self._check_directory(directory)
        started_s = time.perf_counter()
        captured = self._engine.capture()
        facts = Facts(
            rank=self._engine.rank,
            world_size=self._engine.world_size,
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
        state = {
            **training_state.capture(self._optimizers),
            "position": self._position.capture(),
            "random": states or random_states(),
            "others": {name: each.state_dict() for name, each in self._others.items()},
        }
        tensors, metadata = encode(captured.tensors, facts, state)
        pause_s = time.perf_counter() - started_s
        self.pause_s += pause_s
        logger.info(
            "worker %d: checkpoint at step %d; training paused for %.0f ms",
            self._engine.rank,
            captured.step,
            1e3 * pause_s,
        )
        return Draft(directory, self._engine.rank, captured.step, tensors, metadata, self._keep)

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
