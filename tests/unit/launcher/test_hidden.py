"""What frameworks would take for a launcher's is hidden, and found by gossipdp still."""

import os
from unittest import mock

import pytest

from gossipdp.launcher.clusters import hidden
from gossipdp.launcher.environment import Environment

LAUNCHED = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "0",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "one",
    "SLURM_PROCID": "1",
    "OMPI_COMM_WORLD_RANK": "1",
}
KEPT = {"GOSSIPDP_SECRET": "s" * 16, "HOME": "/nowhere", "SLURM_JOB_ID": "7"}


def now() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


@pytest.fixture(autouse=True)
def environment():
    with mock.patch.dict(os.environ, LAUNCHED | KEPT, clear=True):
        yield


def test_hidden_variables_are_read_by_us_alone_and_come_back() -> None:
    before = Environment.read()
    assert (before.rank, before.world_size, before.run_id) == (1, 4, "one")
    with hidden():
        assert now() == KEPT
        assert Environment.read() == before
        with hidden():
            assert Environment.read() == before
        assert now() == KEPT
    assert now() == LAUNCHED | KEPT
    assert Environment.read() == before


def test_they_come_back_after_an_error() -> None:
    with pytest.raises(KeyError), hidden():
        raise KeyError
    assert now() == LAUNCHED | KEPT


def test_what_is_set_within_is_not_kept_for_another() -> None:
    with hidden():
        os.environ["WORLD_SIZE"] = "1"
    assert os.environ["WORLD_SIZE"] == "4"
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    assert Environment.read().world_size == 1
