"""Who a worker is before there is a model, and what a framework sees of it."""

import os
from unittest import mock

import pytest

from gossipdp.integrations import single_process


def launched(rank: int, num_workers: int = 4, **others: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_workers),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        **others,
    }


def test_a_worker_is_named_and_its_launcher_hidden() -> None:
    with mock.patch.dict(os.environ, launched(2)):
        with single_process() as worker:
            assert (worker.rank, worker.world_size, worker.is_first) == (2, 4, False)
            assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} & set(os.environ)
        assert os.environ["RANK"] == "2"


def seed_of(seed: int, variables: dict[str, str]) -> int:
    with mock.patch.dict(os.environ, variables), single_process(seed) as worker:
        return worker.seed


@pytest.mark.parametrize("seed", [0, 1, 42, 2**40])
def test_seeds_are_small_enough_for_numpy_and_differ(seed: int) -> None:
    seeds = [seed_of(seed, launched(rank, 64)) for rank in range(64)]
    seeds += [seed_of(seed, launched(rank, 64, GOSSIPDP_RESTARTS="1")) for rank in range(64)]
    assert len(set(seeds)) == 128
    assert all(0 <= each < 2**32 for each in seeds)
    assert seeds[3] == seed_of(seed, launched(3, 64))


def test_those_that_join_have_seeds_of_their_own() -> None:
    joining = {"GOSSIPDP_JOIN": "127.0.0.1:4", "GOSSIPDP_RUN_ID": "a", "GOSSIPDP_SECRET": 16 * "s"}
    assert seed_of(0, joining) != seed_of(0, joining)
