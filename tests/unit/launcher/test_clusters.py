import pytest

from gossipdp.launcher.clusters import first_host, tasks_per_node, with_launcher
from gossipdp.launcher.environment import Environment

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
        with_launcher(SLURM | {"SLURM_NODEID": "7"})
    with pytest.raises(ValueError, match="SLURM_JOB_ID is 'x'"):
        with_launcher(SLURM | {"SLURM_JOB_ID": "x"})
