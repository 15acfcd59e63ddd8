from pathlib import Path

import pytest

from gossipdp.cli.main import main
from gossipdp.cli.run_launched import is_launched, launched_variables

TOLD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


def test_a_launcher_is_one_that_tells_a_rank() -> None:
    assert is_launched(TOLD)
    assert is_launched({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"})
    assert is_launched({"JOB_COMPLETION_INDEX": "0", "WORLD_SIZE": "2"})
    assert not is_launched({"WORLD_SIZE": "2"})
    assert not is_launched({})


def test_without_a_launcher_the_number_of_workers_is_missing(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in TOLD:
        monkeypatch.delenv(name, raising=False)
    assert main(["run", script]) == 2
    assert "-n (--workers) is missing" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--nnodes", "--node-rank", "--port"])
def test_what_the_launcher_says_is_not_to_be_said_again(
    script: str,
    option: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in TOLD.items():
        monkeypatch.setenv(name, value)
    assert main(["run", option, "2", script]) == 2
    assert "need -n" in capsys.readouterr().err


def test_the_cores_are_shared_with_the_launchers_other_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (TOLD | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "100000"}).items():
        monkeypatch.setenv(name, value)
    assert launched_variables() == {"OMP_NUM_THREADS": "1"}
