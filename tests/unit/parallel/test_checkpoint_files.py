"""Files are whole or absent, whatever fails in the middle of writing one."""

import errno
import logging
import os
import signal
import stat
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import checkpointing
import pytest
import safetensors.torch
import torch
from bitwise import assert_bitwise
from checkpointing import full, steps_saved

from gossipdp import GossipDataParallel, Monitor, RefusedError
from gossipdp.parallel import checkpoint_files
from gossipdp.parallel.checkpoint_files import in_use, read_tensors, write_tensors, written_whole
from gossipdp.parallel.termination import TERMINATION

TENSORS = {
    "a": torch.randn(3, 4),
    "half": torch.tensor([float("nan"), 1.0]).bfloat16(),
    "none": torch.empty(0, 3),
    "one": torch.tensor(True),
    "complex": torch.randn(2, dtype=torch.complex64),
}


def test_a_file_is_what_the_library_reads_and_keeps_every_bit(tmp_path):
    path = tmp_path / "file.safetensors"
    write_tensors(path, TENSORS, {"note": "größer"})
    tensors, metadata = read_tensors(path)
    library = safetensors.torch.load_file(path)
    assert metadata == {"note": "größer"}
    assert tensors.keys() == library.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert_bitwise([tensors[name], library[name]], [tensor, tensor])


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
        except checkpoint_files.DamagedFileError:
            continue
        # Only white space of the header may change without a trace.
        assert index < 8 + length
        assert metadata == {"note": "text"}
        assert_bitwise(tensors["a"], torch.arange(4.0))


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
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode, "as others have"


def test_a_writer_whose_file_is_removed_leaves_the_old_one(tmp_path):
    """Its worker was taken for dead, and that worker's next life writes now."""
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(FileNotFoundError), written_whole(tmp_path / "file"):
        checkpoint_files.remove_unfinished(tmp_path)
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("at", [(checkpoint_files, "_checksum"), (os, "fsync"), (Path, "replace")])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, at):
    """Among its pieces, at its end, or at its renaming."""
    path = tmp_path / "file.safetensors"
    write_tensors(path, TENSORS, {})
    before = path.read_bytes()
    monkeypatch.setattr(*at, full)
    with pytest.raises(OSError, match="No space left"):
        write_tensors(path, {"b": torch.ones(1)}, {})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.setattr(Path, "unlink", Mock(side_effect=PermissionError))
    with pytest.raises(OSError, match="No space left"):  # the first error, not that of the removal
        write_tensors(path, {"b": torch.ones(1)}, {})


def test_each_piece_is_on_the_disk_before_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "PIECE_BYTES", 8)
    sizes, synced, real = [], [], os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda number: synced.append(real(number)))

    def advance() -> None:
        (unfinished,) = tmp_path.iterdir()
        sizes.append((unfinished.stat().st_size, len(synced)))
        if len(sizes) > 5:
            raise TimeoutError  # it is given up

    with pytest.raises(TimeoutError):
        write_tensors(tmp_path / "file.safetensors", {"a": torch.ones(12)}, {}, advance)
    assert not list(tmp_path.iterdir())
    assert [size - sizes[1][0] + 8 for size, _ in sizes[1:]] == [8, 16, 24, 32, 40]
    assert [count for _, count in sizes] == [0, 1, 2, 3, 4, 5]
    synced.clear()
    small = {name: torch.ones(1) for name in "abcdef"}
    write_tensors(tmp_path / "file.safetensors", small, {})
    assert len(synced) == 3, "two small tensors are a piece"


def test_a_file_system_that_synchronizes_no_directory_will_do(tmp_path, monkeypatch):
    real, synchronized = os.fsync, []

    def fsync(number: int) -> None:
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(number)
        synchronized.append(Path(f"/proc/self/fd/{number}").read_bytes())

    monkeypatch.setattr(os, "fsync", fsync)
    write_tensors(tmp_path / "file.safetensors", TENSORS, {})
    assert read_tensors(tmp_path / "file.safetensors")[0].keys() == TENSORS.keys()
    assert synchronized == [(tmp_path / "file.safetensors").read_bytes()], "whole, and then named"
    held = {os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()}
    assert os.path.realpath(tmp_path) not in held


@pytest.mark.parametrize("where", ["full", "file"])
def test_a_directory_that_cannot_be_used_is_said_at_wrapping(linear, tmp_path, monkeypatch, where):
    (tmp_path / "file").touch()
    if where == "full":
        monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RefusedError, match=f"/{where}' cannot be written to .(No space|File exi)"):
        linear(tmp_path / where)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_one_run_at_a_time_uses_a_directory_and_no_dead_one_does(linear, tmp_path, monkeypatch):
    pauses_s: list[float] = []
    ready, tell = os.pipe()
    if (holder := os.fork()) == 0:
        with in_use(tmp_path, "first"):
            if loader := os.fork():
                os.write(tell, str(loader).encode())
            time.sleep(60)
            os._exit(0)
    loader = int(os.read(ready, 20))

    def end_holder(_: float) -> None:
        os.kill(holder, signal.SIGKILL)
        os.waitid(os.P_PID, holder, os.WEXITED | os.WNOWAIT)

    try:
        with in_use(tmp_path, "first"), in_use(tmp_path, "of another model"):
            pass
        named = f"'{tmp_path}' .run first: process {holder} on "
        monkeypatch.setattr(time, "sleep", pauses_s.append)
        with pytest.raises(RefusedError, match=named), in_use(tmp_path, "second"):
            pass
        assert pauses_s == 20 * [0.05], "one that only looks may share the lock for a moment"
        (tmp_path / "worker-0").mkdir()
        (tmp_path / "worker-0" / "step-00000001.safetensors").touch()  # it may be gone soon
        with pytest.raises(RefusedError, match=named):
            linear(tmp_path)
        with pytest.raises(RefusedError, match=named):
            linear(monitor=Monitor(tmp_path))
        monkeypatch.setattr(time, "sleep", end_holder)  # it ends between two looks
        with in_use(tmp_path, "second"):
            os.kill(loader, signal.SIGKILL)
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    os.close(ready)
    os.close(tell)


def step(model: GossipDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Take a step, and wait for its checkpoint and the report on it."""
    checkpointing.step(model, optimizer)
    model._worker.checkpointer.take_last()
    model._worker.checkpointer._wait_for_writer()


def test_the_old_checkpoint_goes_when_the_new_one_is_durable(linear, tmp_path, monkeypatch):
    model, optimizer = linear(tmp_path, 1, keep=1)
    step(model, optimizer)
    events = []
    for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "unlink")):
        real = getattr(owner, name)

        def noted(what, *rest, name=name, real=real, **named):
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


def test_a_full_disk_is_said_loudly_and_costs_no_average(linear, tmp_path, monkeypatch, caplog):
    model, optimizer = linear(tmp_path, 1, keep=1)
    step(model, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        step(model, optimizer)
        with pytest.raises(OSError, match="No space left"):
            model.save_checkpoint()
    assert f"NOT be written to {tmp_path}: [Errno 28] No space left on device" in caplog.text
    assert caplog.records[-1].levelno == logging.ERROR
    assert steps_saved(tmp_path) == [1], "the only one is there until the next is"
    assert model.stats().checkpoints_failed == 1
    step(model, optimizer)  # there is room again
    assert steps_saved(tmp_path) == [3]
    monkeypatch.setattr(os, "fsync", full)
    assert model.consolidate().gradient_steps == 3
    assert f"NOT be saved in {tmp_path}: [Errno 28]" in TERMINATION.failures.pop()
    assert steps_saved(tmp_path) == [3]
    assert not [thread for thread in threading.enumerate() if "checkpoint" in thread.name]


def test_an_error_that_is_no_full_disk_reaches_the_training_loop(linear, tmp_path, monkeypatch):
    model, optimizer = linear(tmp_path, 1)
    monkeypatch.setattr(checkpoint_files, "_checksum", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(RuntimeError, match="a checkpoint could not be written") as info:
        step(model, optimizer)
    assert isinstance(info.value.__cause__, ZeroDivisionError)
    assert model.stats().checkpoints_failed == 1


def test_a_killed_writer_s_files_are_no_checkpoints_and_go_with_the_old_ones(linear, tmp_path):
    model, optimizer = linear(tmp_path, 1)
    for _ in range(3):
        step(model, optimizer)
    model.close()
    directory = tmp_path / "worker-0"
    for number in (3, 4):
        (directory / f".step-0000000{number}.safetensors.77.unfinished").write_bytes(b"half")
    model, optimizer = linear(tmp_path, 1, keep=1, resume="auto")
    step(model, optimizer)
    assert [path.name for path in directory.iterdir()] == ["step-00000004.safetensors"]
