"""The background thread that writes a worker's checkpoints, one after the other."""

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from gossipdp.parallel.checkpoint import file_path, saved_by
from gossipdp.parallel.checkpoint_files import remove_unfinished, write_tensors

logger = logging.getLogger("gossipdp")


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is in memory and to be written."""

    directory: Path
    rank: int
    step: int
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    keep: int

    @property
    def path(self) -> Path:
        """The file that it becomes."""
        return file_path(self.directory, self.rank, self.step)


def write(draft: Draft, is_given_up: Callable[[], bool] = lambda: False) -> Path:
    """Write one checkpoint, and only then remove those beyond the newest ``keep``.

    Raises:
        OSError: of the file system; what was there before is there still.
        GivenUpError: ``is_given_up()`` said so.
    """
    path = draft.path
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_unfinished(path.parent)
    write_tensors(path, draft.tensors, draft.metadata, is_given_up)
    for saved in saved_by(draft.directory, draft.rank)[draft.keep :]:
        if saved.path != path:
            saved.path.unlink(missing_ok=True)
    return path


class CheckpointWriter:
    """Writes drafts in a thread of its own, from the first draft to :meth:`close`.

    Only the main thread calls; it hands over one draft at a time.
    """

    def __init__(self, rank: int) -> None:
        self._drafts: queue.SimpleQueue[tuple[Draft, Future[Path]] | None] = queue.SimpleQueue()
        self._given_up = threading.Event()
        self._thread: threading.Thread | None = None
        self._name = f"gossipdp-checkpoint-{rank}"

    def write(self, draft: Draft) -> "Future[Path]":
        """Write in the background; the future gets the path or the error."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        future: Future[Path] = Future()
        self._drafts.put((draft, future))
        return future

    def close(self, timeout_s: float) -> None:
        """End the thread; a write that takes longer than ``timeout_s`` is given up."""
        if self._thread is None:
            return
        self._drafts.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._given_up.set()
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("a checkpoint is still being written; what was there before it stays")
        self._thread = None

    def _run(self) -> None:
        while (given := self._drafts.get()) is not None:
            draft, future = given
            try:
                future.set_result(write(draft, self._given_up.is_set))
            except Exception as error:
                future.set_exception(error)
            del given, draft, future  # its tensors are large
