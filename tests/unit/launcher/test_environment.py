import ipaddress
import os
import socket
import sys
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
from run_processes import TORCHRUN

from gossipdp.errors import RendezvousError
from gossipdp.launcher import environment as environments
from gossipdp.launcher.environment import Environment, check_platform, first_host

SECRET = "a secret of this test"
SECRET_BYTES = SECRET.encode()


@pytest.mark.parametrize("store_host", ["127.0.0.1", "localhost"])
def test_a_store_on_loopback_means_loopback_and_warns_of_workers_elsewhere(store_host, caplog):
    variables = {**TORCHRUN, "MASTER_ADDR": store_host}
    here = Environment.read(variables | {"LOCAL_WORLD_SIZE": "4"})
    assert here.choose_host() in ("127.0.0.1", "::1")
    assert Environment().choose_host() == "127.0.0.1"
    assert not caplog.records
    Environment.read(variables).choose_host()
    assert "Set GOSSIPDP_HOST" in caplog.text


@pytest.mark.parametrize("store_host", ["127.0.0.1", "::1", "0.0.0.0", "::"])
def test_all_addresses_are_bound_only_where_the_user_says_so(store_host):
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
    # The others are given an address that they can dial.
    assert everywhere.announced_host("0.0.0.0") == environment.choose_host()
    assert everywhere.announced_host("10.1.2.3") == "10.1.2.3"


def test_a_host_that_does_not_resolve_is_named():
    with pytest.raises(RendezvousError, match="cannot reach GOSSIPDP_HOST 'no such host'"):
        Environment.read(TORCHRUN | {"GOSSIPDP_HOST": "no such host"}).choose_host()
    assert not environments.is_loopback("no such host")


@pytest.mark.parametrize(("third", "is_here"), [("127.0.0.2", True), ("10.0.0.1", False)])
def test_a_name_is_of_this_machine_alone_if_all_its_addresses_are(third, is_here, monkeypatch):
    found = [(0, 0, 0, "", (each, 0)) for each in ("127.0.0.1", "::1", third)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    assert environments.is_loopback("a name") == is_here


def test_another_system_than_linux_is_refused_at_once():
    check_platform("linux")
    for other in ("win32", "darwin"):
        with pytest.raises(OSError, match=f"trains on Linux, and this is {other}; on Windows"):
            check_platform(other)


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
PORT = 20000 + (16 * 4711 + 2) % 10000
ONE_NODE = {"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
JOIN = {"GOSSIPDP_JOIN": "10.0.0.1:65535"}
NO_PLACES = "10.0.0.1", "a:0", "a:65536", "::1:5"
OWN_STORE = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
POD = {"JOB_COMPLETION_INDEX": "2"}
OF_TORCHRUN = replace(
    Environment(3, 4, 1, 2, store_host="127.0.0.1", store_port=29500, run_id="none"),
    agent_store=True,
    restart_count=2,
)
JOINER = Environment(-1, 0, run_id="r", unique_run_id=True, join=(("10.0.0.1", 65535),))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, OF_TORCHRUN),
        (TORCHRUN | {"GOSSIPDP_PORT": "65534"}, replace(OF_TORCHRUN, port=65535)),
        (SLURM, Environment(3, 5, 1, 3, store_host="gpu07", store_port=PORT)),
        # on one node, the workers meet on loopback
        (SLURM | ONE_NODE, Environment(3, 5, 1, 2, store_host="127.0.0.1", store_port=PORT)),
        # RANK was set nearer to this process
        (SLURM | TORCHRUN | {"RANK": "0"}, replace(OF_TORCHRUN, rank=0)),
        # the user's own store
        (SLURM | OWN_STORE, Environment(3, 5, 1, 3, store_host="10.0.0.1", store_port=1234)),
        # a worker that joins has no rank from Slurm
        (SLURM | JOIN | {"GOSSIPDP_RUN_ID": "r"}, JOINER),
        # the shell of an sbatch script is no task
        (SLURM | {"SLURM_STEP_NUM_TASKS": "", "SLURM_PROCID": "0"}, Environment()),
        # a pod of an indexed job takes its index for its rank
        (
            POD | OWN_STORE | {"WORLD_SIZE": "4"},
            Environment(2, 4, 0, 1, store_host="10.0.0.1", store_port=1234),
        ),
        # one worker alone
        (POD, Environment()),
        ({"MASTER_ADDR": "elsewhere", "GOSSIPDP_SECRET": SECRET}, Environment(secret=SECRET_BYTES)),
    ],
)
def test_each_launcher_s_variables_are_read(variables, expected):
    assert Environment.read(variables) == expected


def test_keys_are_of_one_start_and_the_secret_is_not_shown():
    assert OF_TORCHRUN.key_prefix == "gossipdp/none/2/"
    assert SECRET not in repr(Environment.read(TORCHRUN | {"GOSSIPDP_SECRET": SECRET}))


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu-a[1-3].cluster,b", "gpu-a1.cluster"),
        ("rack[0-1]node[4,6]", "rack0node4"),
    ],
)
def test_first_host(hosts, first):
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (TORCHRUN | {"RANK": "4"}, r"RANK is 4; with WORLD_SIZE 4 it must be in 0\.\.3"),
        (TORCHRUN | {"RANK": "one"}, "RANK is 'one'; it must be a whole number"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
        (TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT is 65536"),
        (TORCHRUN | {"GOSSIPDP_PORT": "-2"}, "GOSSIPDP_PORT is -1"),
        (TORCHRUN | {"GOSSIPDP_SECRET": "15 letters long"}, "GOSSIPDP_SECRET has 15 bytes; give"),
        *((TORCHRUN | {it: ""}, f"but not {it}: start") for it in environments.REQUIRED),
        (JOIN, "GOSSIPDP_JOIN is set, but not GOSSIPDP_RUN_ID"),
        *((JOIN | {"GOSSIPDP_JOIN": it}, f"N is '{it}'; write HOST:PORT") for it in NO_PLACES),
        ({"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4"}, "but not MASTER_ADDR, MASTER_PORT"),
        (SLURM | {"SLURM_STEP_NODELIST": ","}, "no host in the Slurm host list"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4x2"}, "not of the form"),
        (SLURM | {"SLURM_NODEID": "2"}, "SLURM_NODEID is 2, but .* has 2 nodes"),
        (SLURM | {"SLURM_NODEID": "-1"}, "SLURM_NODEID is -1"),
        (SLURM | {"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID is 'x'"),
    ],
)
def test_a_bad_value_is_named(variables, message):
    with pytest.raises(ValueError, match=message):
        Environment.read(variables)


MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SHARD = MASTER | {"RANK": "1", "WORLD_SIZE": "2", "GOSSIPDP_RANK": "2", "GOSSIPDP_WORLD_SIZE": "3"}
SHARD |= {"GOSSIPDP_MASTER_ADDR": "::1", "GOSSIPDP_MASTER_PORT": "7"}


def test_who_joins_listens_where_its_contact_is_reached_though_the_store_has_gone():
    variables = TORCHRUN | {"MASTER_ADDR": "gone.invalid", "GOSSIPDP_RUN_ID": "r"}
    environment = Environment.read(variables | {"GOSSIPDP_JOIN": "127.0.0.1:9,gone.invalid:9"})
    assert environment.choose_host() == "127.0.0.1"


JOINS = JOIN | {"GOSSIPDP_RUN_ID": "r", "GOSSIPDP_RANK": "", "GOSSIPDP_WORLD_SIZE": "0"}


@pytest.mark.parametrize(
    ("variables", "group", "found"),
    [
        (MASTER, (2, 4), (2, 4, 0)),
        (MASTER, None, (0, 1, 0)),
        (TORCHRUN, (3, 4), (3, 4, 0)),
        (TORCHRUN, (0, 1), (3, 4, 0)),  # some frameworks begin a group on each worker
        (SLURM, (1, 2), (1, 2, 0)),  # one task a node spawned them
        (SHARD, (1, 2), (2, 3, 1)),
        (SHARD | JOINS, (1, 2), (-1, 0, 1)),
        (TORCHRUN, (2, 4), "RANK is 3 in the environment and 2 in torch.* remove RANK and WORLD"),
        (MASTER | {"WORLD_SIZE": "1"}, (3, 4), "WORLD_SIZE is 1 in the environment and 4 in"),
        ({}, (1, 2), r"init_process_group\), but not MASTER_ADDR, MASTER_PORT: start"),
    ],
)
def test_a_process_group_of_several_says_who_this_is(variables, group, found):
    dist = mock.Mock(get_rank=lambda: group[0], get_world_size=lambda: group[1])
    dist.is_initialized.return_value = group is not None
    modules = mock.patch.dict(sys.modules, {"torch.distributed": dist})
    is_error = isinstance(found, str)
    refused = pytest.raises(ValueError, match=found) if is_error else nullcontext()
    with modules, mock.patch.dict(os.environ, variables, clear=True), refused:
        environment = Environment.read()
        assert (environment.rank, environment.world_size, environment.shard) == found


OF_OTHERS = {"GROUP_RANK": "0", "ROLE_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}
LAUNCHED = TORCHRUN | OF_OTHERS | {"SLURM_PROCID": "1", "TORCHELASTIC_RUN_ID": "one"}
KEPT = {"GOSSIPDP_SECRET": "s" * 16, "HOME": "/nowhere", "SLURM_JOB_ID": "7"}


def now() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


@pytest.fixture(autouse=True)
def environment():
    with mock.patch.dict(os.environ, LAUNCHED | KEPT, clear=True):
        yield


def test_hidden_variables_are_read_by_us_alone_and_come_back():
    before = Environment.read()
    assert (before.rank, before.world_size, before.run_id) == (3, 4, "one")
    with environments.without_launcher_variables():
        assert (now(), Environment.read()) == (KEPT, before)
        with environments.without_launcher_variables():
            assert Environment.read() == before
        assert now() == KEPT
    assert (now(), Environment.read()) == (LAUNCHED | KEPT, before)
    with pytest.raises(KeyError), environments.without_launcher_variables():
        raise KeyError
    assert now() == LAUNCHED | KEPT


def test_a_value_set_within_is_not_kept_for_another():
    with environments.without_launcher_variables():
        os.environ["WORLD_SIZE"] = "1"
    assert os.environ["WORLD_SIZE"] == "4"
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    assert Environment.read().world_size == 1
