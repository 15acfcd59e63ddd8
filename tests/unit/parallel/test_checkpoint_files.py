"""Files are whole or absent, whatever fails in the middle of writing one."""

import errno
import io
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpointing
import pytest
import safetensors.torch
import torch
from checkpointing import steps_saved

from gossipdp import GossipDataParallel
from gossipdp.parallel.checkpoint_files import (
    DamagedFileError,
    GivenUpError,
    read_tensors,
    remove_unfinished,
    write_tensors,
    written_whole,
)

TENSORS = {
    "a": torch.randn(3, 4),
    "half": torch.tensor([float("nan"), 1.0]).bfloat16(),
    "none": torch.empty(0, 3),
    "one": torch.tensor(True),
    "complex": torch.randn(2, dtype=torch.complex64),
}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def test_a_file_is_what_the_library_reads_and_keeps_every_bit(tmp_path):
    path = tmp_path / "file.safetensors"
    write_tensors(path, TENSORS, {"note": "größer"})
    tensors, metadata = read_tensors(path)
    library = safetensors.torch.load_file(path)
    assert metadata == {"note": "größer"}
    assert tensors.keys() == library.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert same(tensors[name], tensor)
        assert same(library[name], tensor)


def test_every_byte_is_under_the_checksum_or_refused(tmp_path):
    path = tmp_path / "file.safetensors"
    write_tensors(path, {"a": torch.arange(4.0)}, {"note": "text"})
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    for index in range(len(data)):
        changed = bytearray(data)
        changed[index] ^= 0x10
        path.write_bytes(changed)
        try:
            tensors, metadata = read_tensors(path)
        except DamagedFileError:
            continue
        # Only white space of the header may change without a trace.
        assert index < 8 + length
        assert metadata == {"note": "text"}
        assert same(tensors["a"], torch.arange(4.0))


def test_two_writers_of_one_path_do_not_meet(tmp_path):
    """As two containers do, whose processes have the same number, and share a directory."""
    path = tmp_path / "model.pt"
    with written_whole(path) as one:
        one.write(b"one")
        with written_whole(path) as other:
            other.write(b"the other")
        assert path.read_bytes() == b"the other"
        one.write(b", and more")
    assert path.read_bytes() == b"one, and more"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_has_the_permissions_that_others_have(tmp_path):
    (tmp_path / "other").touch()
    with written_whole(tmp_path / "file"):
        pass
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_writer_whose_file_is_removed_leaves_the_old_one(tmp_path):
    """Its worker was taken for dead, and that worker's next life writes now."""
    (tmp_path / "file").write_bytes(b"old")

    def write() -> None:
        with written_whole(tmp_path / "file") as file:
            file.write(b"new")
            remove_unfinished(tmp_path)

    with pytest.raises(FileNotFoundError):
        write()
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def break_writes(patch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let every new file refuse what is written to it."""

    class Broken(io.FileIO):
        def write(self, data: object) -> int:
            raise error

    real = Path.open

    def open_(path: Path, mode: str = "r", **rest: Any) -> object:
        return Broken(path, "xb") if mode == "xb" else real(path, mode, **rest)

    patch.setattr(Path, "open", open_)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "write": lambda patch: break_writes(patch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
    "fsync": lambda patch: patch.setattr(os, "fsync", full),
    "rename": lambda patch: patch.setattr(Path, "replace", full),
}


@pytest.mark.parametrize("where", FAULTS)
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, where):
    path = tmp_path / "file.safetensors"
    write_tensors(path, TENSORS, {})
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        FAULTS[where](patch)
        with pytest.raises(OSError, match="No space left"):
            write_tensors(path, {"b": torch.ones(1)}, {})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_is_given_up_leaves_nothing(tmp_path):
    looks = iter([False] * 6 + [True])
    with pytest.raises(GivenUpError):
        write_tensors(tmp_path / "file.safetensors", TENSORS, {}, lambda: next(looks))
    assert not list(tmp_path.iterdir())


def step(model: GossipDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Take a step, and wait for its checkpoint and the report on it."""
    checkpointing.step(model, optimizer)
    model._checkpointer.take_last()
    model._checkpointer._wait_for_writer()


def test_the_old_checkpoint_goes_when_the_new_one_is_durable(linear, tmp_path, monkeypatch):
    model, optimizer = linear(tmp_path, 1, keep=1)
    step(model, optimizer)
    events = []
    for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "unlink")):
        real = getattr(owner, name)

        def noted(
            what: int | Path, *rest: object, name: str = name, real: Any = real, **named: object
        ) -> object:
            path = Path(os.readlink(f"/proc/self/fd/{what}")) if isinstance(what, int) else what
            events.append((name, "directory" if path.is_dir() else path.name[:14]))
            return real(what, *rest, **named)

        monkeypatch.setattr(owner, name, noted)
    step(model, optimizer)
    assert events == [
        ("fsync", ".step-00000002"),
        ("replace", ".step-00000002"),
        ("fsync", "directory"),
        ("unlink", "step-00000001."),
    ]


def test_a_full_disk_is_said_loudly_and_training_goes_on(linear, tmp_path, monkeypatch, caplog):
    model, optimizer = linear(tmp_path, 1, keep=1)
    step(model, optimizer)
    with monkeypatch.context() as patch:
        FAULTS["fsync"](patch)
        step(model, optimizer)
        with pytest.raises(OSError, match="No space left"):
            model.save_checkpoint()
    assert "a checkpoint could NOT be written: [Errno 28] No space left on device" in caplog.text
    assert caplog.records[-1].levelno == logging.ERROR
    assert steps_saved(tmp_path) == [1], "the only one is there until the next is"
    assert model.stats().checkpoints_failed == 1
    step(model, optimizer)  # there is room again
    model.close()
    assert steps_saved(tmp_path) == [3]
    assert not [thread for thread in threading.enumerate() if "checkpoint" in thread.name]


def test_an_error_that_is_no_full_disk_reaches_the_training_loop(linear, tmp_path, monkeypatch):
    model, optimizer = linear(tmp_path, 1)
    break_writes(monkeypatch, ZeroDivisionError("a mistake of ours"))
    with pytest.raises(RuntimeError, match="a checkpoint could not be written") as info:
        step(model, optimizer)
    assert isinstance(info.value.__cause__, ZeroDivisionError)


def test_a_killed_writer_s_file_is_no_checkpoint_and_goes(linear, tmp_path):
    model, optimizer = linear(tmp_path, 1)
    step(model, optimizer)
    model.close()
    left = tmp_path / "worker-0" / ".step-00000003.safetensors.77.unfinished"
    left.write_bytes(b"half")
    model, optimizer = linear(tmp_path, 1, resume="auto")
    step(model, optimizer)
    assert steps_saved(tmp_path) == [2, 1]
    assert not left.exists()
