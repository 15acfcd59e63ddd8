import ipaddress
import logging
import os
from unittest import mock

import pytest

from gossipdp.errors import RendezvousError
from gossipdp.launcher.environment import (
    Environment,
    check_platform,
    without_launcher_variables,
)
from gossipdp.launcher.launch_plan import LaunchPlan
from gossipdp.launcher.schedulers import first_host, tasks_per_node, with_torchrun_names

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
    plan = LaunchPlan(3, 3, 0, store=("127.0.0.1", 5), run_id="abc", secret=SECRET)
    assert Environment.read(plan.worker_variables(1)) == Environment(
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


def test_windows_is_told_at_once() -> None:
    check_platform("linux")
    with pytest.raises(OSError, match="trains on Linux"):
        check_platform("win32")


# As srun of Slurm 22.05 sets them for the fourth task of a step on two nodes.
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2,3",
    "SLURM_STEP_NODELIST": "gpu[07,09]",
    "SLURM_NTASKS": "8",
}


def test_a_task_of_a_slurm_step_knows_its_place() -> None:
    environment = Environment.read(SLURM)
    assert (environment.rank, environment.world_size) == (3, 5)
    assert (environment.local_rank, environment.local_world_size) == (1, 3)
    assert environment.store_host == "gpu07"
    assert environment.store_port == 20000 + (16 * 4711 + 2) % 10000
    assert not environment.agent_store


def test_a_slurm_step_on_one_node_meets_on_loopback() -> None:
    alone = SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
    assert Environment.read(alone).store_host == "127.0.0.1"


def test_the_shell_of_an_sbatch_script_is_no_task() -> None:
    batch = {name: value for name, value in SLURM.items() if not name.startswith("SLURM_STEP")} | {
        "SLURM_PROCID": "0"
    }
    assert Environment.read(batch).world_size == 1


def test_who_set_rank_is_nearer_than_slurm() -> None:
    inner = SLURM | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    environment = Environment.read(inner)
    assert (environment.rank, environment.world_size, environment.store_host) == (0, 2, "h")


def test_what_the_user_set_stands_beside_slurms_ranks() -> None:
    environment = Environment.read(SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert environment.rank == 3
    assert (environment.store_host, environment.store_port) == ("10.0.0.1", 1234)


def test_one_that_joins_has_no_rank_from_slurm() -> None:
    joining = SLURM | {
        "GOSSIPDP_JOIN": "10.0.0.1:4000",
        "GOSSIPDP_RUN_ID": "r",
        "GOSSIPDP_SECRET": "s" * 16,
    }
    assert Environment.read(joining).needs_rank


def test_a_pod_of_an_indexed_job_takes_its_index_for_its_rank() -> None:
    pod = {"JOB_COMPLETION_INDEX": "2", "MASTER_ADDR": "train-0.train", "MASTER_PORT": "29400"}
    environment = Environment.read(pod | {"WORLD_SIZE": "4"})
    assert (environment.rank, environment.world_size) == (2, 4)
    assert (environment.local_rank, environment.local_world_size) == (0, 1)


def test_an_indexed_job_without_world_size_is_many_runs_of_one() -> None:
    assert Environment.read({"JOB_COMPLETION_INDEX": "2"}).world_size == 1


def test_a_pod_that_knows_no_master_is_told_so() -> None:
    with pytest.raises(ValueError, match="but not MASTER_ADDR, MASTER_PORT"):
        Environment.read({"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("vm", "vm"),
        ("a,b", "a"),
        ("gpu-a[1-3].cluster,b", "gpu-a1.cluster"),
        ("rack[0-1]node[4,6]", "rack0node4"),
    ],
)
def test_first_host(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_what_is_not_slurms_form_is_an_error() -> None:
    with pytest.raises(ValueError, match="no host"):
        first_host("")
    with pytest.raises(ValueError, match="not of the form"):
        tasks_per_node("4x2")
    with pytest.raises(ValueError, match="SLURM_NODEID is 7"):
        with_torchrun_names(SLURM | {"SLURM_NODEID": "7"})
    with pytest.raises(ValueError, match="SLURM_JOB_ID is 'x'"):
        with_torchrun_names(SLURM | {"SLURM_JOB_ID": "x"})


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
    with without_launcher_variables():
        assert now() == KEPT
        assert Environment.read() == before
        with without_launcher_variables():
            assert Environment.read() == before
        assert now() == KEPT
    assert now() == LAUNCHED | KEPT
    assert Environment.read() == before


def test_they_come_back_after_an_error() -> None:
    with pytest.raises(KeyError), without_launcher_variables():
        raise KeyError
    assert now() == LAUNCHED | KEPT


def test_what_is_set_within_is_not_kept_for_another() -> None:
    with without_launcher_variables():
        os.environ["WORLD_SIZE"] = "1"
    assert os.environ["WORLD_SIZE"] == "4"
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    assert Environment.read().world_size == 1
