"""What the frameworks' adapters may ask before there is a model."""

import os
from unittest import mock

import pytest

from gossipdp.integrations.options import known_num_workers

STARTED = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
JOINING = {"GOSSIPDP_JOIN": "127.0.0.1:29500", "GOSSIPDP_RUN_ID": "run", "GOSSIPDP_SECRET": "word"}


@pytest.mark.parametrize(("variables", "expected"), [({}, 1), (STARTED, 4), (JOINING, 1)])
def test_the_number_of_workers_is_the_launcher_s_and_at_least_one(
    variables: dict[str, str], expected: int
) -> None:
    with mock.patch.dict(os.environ, variables):
        assert known_num_workers(None) == expected
