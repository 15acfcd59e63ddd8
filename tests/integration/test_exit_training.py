"""One end of ``tests/chaos/exits.py``, which has them all."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.processes


def load_exits() -> ModuleType:
    path = Path(__file__).parents[1] / "chaos" / "exits.py"
    spec = importlib.util.spec_from_file_location("chaos_exits", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_killed_gossipdp_run_leaves_nothing_but_a_last_checkpoint_of_each_worker(
    tmp_path: Path,
) -> None:
    load_exits().check_the_end(tmp_path, "SIGKILL")
