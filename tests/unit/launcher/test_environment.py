import ipaddress
import logging
from pathlib import Path

import pytest

from gossipdp.errors import RendezvousError
from gossipdp.launcher.environment import (
    Environment,
    check_platform,
    check_private,
)
from gossipdp.launcher.team import Team

SECRET = "a secret of this test"
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_without_rank_and_world_size_one_worker_is_alone() -> None:
    environment = Environment.read({"MASTER_ADDR": "elsewhere", "GOSSIPDP_SECRET": SECRET})
    assert (environment.rank, environment.world_size) == (0, 1)
    assert environment.store_host is None
    assert environment.secret == SECRET.encode()
    assert environment.choose_host() == "127.0.0.1"


def test_torchruns_variables_are_read() -> None:
    environment = Environment.read(TORCHRUN)
    assert (environment.rank, environment.world_size) == (3, 4)
    assert (environment.local_rank, environment.local_world_size) == (1, 2)
    assert environment.agent_store
    assert environment.key_prefix == "gossipdp/none/2/"
    assert not environment.unique_run_id
    assert environment.secret is None


def test_the_launchers_variables_are_read_back() -> None:
    team = Team(3, 3, 0, store=("127.0.0.1", 5), run_id="abc", secret=SECRET)
    assert Environment.read(team.variables(1)) == Environment(
        rank=1,
        world_size=3,
        local_rank=1,
        local_world_size=3,
        store_host="127.0.0.1",
        store_port=5,
        agent_store=True,
        run_id="abc",
        unique_run_id=True,
        secret=SECRET.encode(),
    )


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_half_set_environment_names_what_is_missing(missing: str) -> None:
    variables = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(ValueError, match=f"but not {missing}: start the workers with"):
        Environment.read(variables)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "4", r"RANK is 4; with WORLD_SIZE 4 it must be in 0\.\.3"),
        ("RANK", "one", "RANK is 'one'; it must be a whole number"),
        ("WORLD_SIZE", "0", "WORLD_SIZE is 0"),
        ("MASTER_PORT", "70000", "MASTER_PORT is 70000"),
        ("GOSSIPDP_PORT", "-1", "GOSSIPDP_PORT is -1"),
        ("GOSSIPDP_SECRET", "fifteen letters", "GOSSIPDP_SECRET has 15 bytes; give at least 16"),
    ],
)
def test_a_bad_value_is_named(name: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Environment.read({**TORCHRUN, "LOCAL_RANK": "0", name: value})


def test_a_fixed_port_is_the_first_of_a_block() -> None:
    assert Environment.read({**TORCHRUN, "GOSSIPDP_PORT": "7000"}).port == 7001


def test_the_secret_is_not_shown() -> None:
    assert SECRET not in repr(Environment.read({**TORCHRUN, "GOSSIPDP_SECRET": SECRET}))


@pytest.mark.parametrize("store_host", ["127.0.0.1", "localhost"])
def test_a_store_on_loopback_means_loopback(
    store_host: str, caplog: pytest.LogCaptureFixture
) -> None:
    variables = {**TORCHRUN, "MASTER_ADDR": store_host, "LOCAL_WORLD_SIZE": "4"}
    assert Environment.read(variables).choose_host() in ("127.0.0.1", "::1")
    assert not caplog.records


def test_loopback_with_workers_elsewhere_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gossipdp"):
        Environment.read(TORCHRUN).choose_host()
    assert "Set GOSSIPDP_HOST" in caplog.text


def test_the_host_can_be_chosen() -> None:
    assert Environment.read({**TORCHRUN, "GOSSIPDP_HOST": "10.1.2.3"}).choose_host() == "10.1.2.3"


@pytest.mark.parametrize("store_host", ["127.0.0.1", "::1", "0.0.0.0", "::"])
def test_all_addresses_are_bound_only_where_the_user_says_so(store_host: str) -> None:
    """Even a store at "all addresses" leads to one of them."""
    variables = {**TORCHRUN, "MASTER_ADDR": store_host}
    try:
        environment = Environment.read(variables)
        assert not ipaddress.ip_address(environment.choose_host()).is_unspecified
    except RendezvousError:
        assert ":" in store_host  # a machine without IPv6
        return
    everywhere = Environment.read({**variables, "GOSSIPDP_HOST": "0.0.0.0"})
    assert everywhere.choose_host() == "0.0.0.0"
    # ... and what the others are told is an address that they can dial.
    assert everywhere.announced_host("0.0.0.0") == environment.choose_host()
    assert everywhere.announced_host("10.1.2.3") == "10.1.2.3"


def test_a_host_that_does_not_resolve_is_named() -> None:
    variables = {**TORCHRUN, "GOSSIPDP_HOST": "no such host"}
    with pytest.raises(RendezvousError, match="cannot reach GOSSIPDP_HOST 'no such host'"):
        Environment.read(variables).choose_host()


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o400, False), (0o640, True)])
def test_a_secret_file_that_others_may_read_is_warned_of(
    tmp_path: Path, mode: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "secret"
    path.touch()
    path.chmod(mode)
    check_private("--secret-file", path)
    assert ("others than you may read --secret-file" in caplog.text) == warns


def test_windows_is_told_at_once() -> None:
    check_platform("linux")
    with pytest.raises(OSError, match="trains on Linux"):
        check_platform("win32")
