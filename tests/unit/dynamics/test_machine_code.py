"""The machine code of the loops on disk, by the shortest of them."""

import errno
import os
import shutil
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from gossipdp.dynamics import machine_code, update
from gossipdp.dynamics.machine_code import BLOCK, Loop

engines = []
"""LLVM's, which hold the code of their loops; as they are held in use."""


def flow() -> Loop:
    """Load the loop as a fresh interpreter would."""
    with pytest.MonkeyPatch.context() as fresh:
        for name in ("_llvm", "_origin", "_load"):
            fresh.setattr(machine_code, name, cache(getattr(machine_code, name).__wrapped__))
        engines.append(machine_code._llvm())
        return machine_code.loop.__wrapped__("flow")


def flows(loop: Loop) -> bool:
    """Return whether the loop adds a quarter of c to each of 37 values, and to no other."""
    room, expected = torch.arange(53.0), torch.arange(53.0)
    expected[:37] += 0.5
    loop(room[:37], torch.full((37,), 2.0), 0.25)
    return torch.equal(room, expected)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return two empty places for machine code, in the place of the real ones."""
    folders = [tmp_path / "beside", tmp_path / "of the user"]
    monkeypatch.setattr(machine_code, "_folders", lambda: folders)
    return folders


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of the loop, compiled once for all tests."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_code, "_folders", lambda: [folder])
        assert flows(flow())
    (code,) = folder.iterdir()
    return code


@pytest.fixture
def kept(compiled: Path, folders: list[Path]) -> Path:
    """Return the file in the first of the places."""
    folders[0].mkdir()
    return Path(shutil.copy(compiled, folders[0]))


def without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("gossipdp.dynamics.update_loops", raising=False)
    monkeypatch.setitem(sys.modules, "gossipdp.dynamics.update_loops", None)


def test_half_a_file_is_compiled_again_and_a_whole_one_needs_no_numba(kept, monkeypatch):
    kept.write_bytes(kept.read_bytes()[:1000])
    assert flows(flow())
    without_numba(monkeypatch)
    assert flows(flow())
    kept.unlink()
    with pytest.raises(ImportError):
        flow()


@pytest.mark.parametrize(
    "c", [torch.ones(36), torch.ones(37, dtype=torch.float64), torch.ones(74)[::2]]
)
def test_no_other_memory_is_touched(c):
    with pytest.raises(TypeError, match="a loop over 37"):
        machine_code.loop("flow")(torch.zeros(37), c, 0.5)


@pytest.mark.parametrize("has_c", [False, True])
@pytest.mark.parametrize("name", machine_code.ARGUMENTS)
def test_what_lies_around_the_arrays_of_a_loop_stays_and_does_not_matter(name, has_c):
    """No loop writes beyond its arrays, and nothing that it reads there changes its results."""
    loop, found = machine_code.loop(name, torch.float32, torch.bfloat16), []
    for factor in (1, 2):
        given, around = [], []
        for kind in machine_code.ARGUMENTS[name].split():
            prefix, _, dtype = kind.rpartition("_")
            if dtype in {"bool", "number"}:
                given.append(has_c if dtype == "bool" else 0.5)
                continue
            length, value = {"": 700, "block": 2, "any": 2 * BLOCK}[prefix], 3 + len(given)
            dtype = getattr(torch, {"x": "float32", "wire": "bfloat16"}.get(dtype, dtype))
            room = torch.full((length + 2 * BLOCK,), factor * value, dtype=dtype)
            before, array, behind = room.split([BLOCK, length, BLOCK])
            given.append(array.fill_(value))
            around += [before, behind]
        kept = [each.clone() for each in around]
        result = loop(*given)
        assert all(map(torch.equal, around, kept))
        found.append([result, *(each.tolist() for each in given if torch.is_tensor(each))])
    assert found[0] == found[1]


@pytest.mark.parametrize("version", ["of numba", "of the loops", "by other options"])
def test_code_of_another_version_is_not_loaded(kept, monkeypatch, tmp_path, version):
    if version == "of numba":
        monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name} 1000")
    elif version == "by other options":
        monkeypatch.setenv("NUMBA_OPT", "0")
    else:
        source = tmp_path / "update_loops.py"
        source.write_text(machine_code._SOURCE.read_text() + "# and more")
        monkeypatch.setattr(machine_code, "_SOURCE", source)
    without_numba(monkeypatch)
    with pytest.raises(ImportError):
        flow()


def test_numba_that_may_not_compile_is_named(kept, monkeypatch):
    kept.unlink()
    monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    with pytest.raises(ImportError, match="NUMBA_DISABLE_JIT is set"):
        flow()


def test_the_user_s_place_serves_if_ours_cannot_be_written(folders, monkeypatch, caplog):
    folders[0].write_text("a file")
    assert flows(flow())
    without_numba(monkeypatch)
    assert flows(flow())
    assert not caplog.records


def test_loops_work_if_the_disk_is_full(folders, monkeypatch, caplog):
    write = Path.write_bytes

    def fill(path: Path, data: bytes) -> int:
        write(path, data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill)
    assert flows(flow())
    (said,) = caplog.messages
    assert said.endswith("each start compiles them: [Errno 28] No space left on device")
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


def test_the_places_are_beside_python_s_and_in_the_user_s_cache(monkeypatch):
    ours = Path(update.__file__).parent / "__pycache__"
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setenv("XDG_CACHE_HOME", "/of/mine")
    assert list(machine_code._folders()) == [ours, Path("/of/mine/gossipdp")]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/ann")
    assert list(machine_code._folders())[1:] == [Path("/home/ann/.cache/gossipdp")]
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 2)  # a container's user without a home
    assert list(machine_code._folders()) == [ours]
