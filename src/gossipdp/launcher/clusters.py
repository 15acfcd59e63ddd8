"""What Slurm and Kubernetes tell a process about itself, in torchrun's words; and hiding it.

Slurm's srun sets SLURM_* for each task of a step; the shell of an sbatch script has no
SLURM_STEP_NUM_TASKS, so that what runs there without srun stays one worker. An indexed Job of
Kubernetes sets JOB_COMPLETION_INDEX; how many pods there are its manifest must say (WORLD_SIZE).

Sources: srun(1), "Output environment variables"; kubernetes.io, "Jobs", completion mode Indexed.

Accelerate, the Trainer of transformers and Lightning read RANK, WORLD_SIZE and their like when
they are set up, start ``torch.distributed``, average gradients and give each worker a share of the
data. Under gossipdp each worker is a training of its own to them: :func:`hidden` takes what they
must not see out of the environment, and ``Environment.read`` finds it still.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# Below the ports that Linux gives to whoever asks for any (32768 and up).
FIRST_SLURM_PORT, NUM_SLURM_PORTS, PORTS_A_JOB = 20000, 10000, 16
# What `hidden` hides: torchrun's and ours; those of Slurm's srun, of PMI, Open MPI and MVAPICH,
# which the frameworks take for a launcher's as well.
PREFIXES = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_")
NAMES = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS"),
}

_hidden: dict[str, str] = {}


def with_launcher(variables: Mapping[str, str]) -> dict[str, str]:
    """``variables`` with torchrun's names, where Slurm or Kubernetes started this process.

    What is set already is not replaced, and with RANK set nothing is added: whoever set it is
    nearer to this process.

    Raises:
        ValueError: a variable of Slurm's has a form that is not known.

    Example:
        >>> with_launcher({"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4"})["RANK"]
        '2'
    """
    given = {name: value for name, value in variables.items() if value}
    if "RANK" in given:
        return given
    if "SLURM_PROCID" in given and "SLURM_STEP_NUM_TASKS" in given:
        return _slurm_variables(given) | given
    if "JOB_COMPLETION_INDEX" in given and "WORLD_SIZE" in given:
        rank = given["JOB_COMPLETION_INDEX"]
        return {"RANK": rank, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} | given
    return given


def _slurm_variables(given: Mapping[str, str]) -> dict[str, str]:
    """RANK and the like of one task of a Slurm step.

    The workers meet at the step's first node, on a port that follows from the job and the step:
    20000 + (16 · job + step) mod 10000.
    """
    numbers = {
        name: given.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID")
    }
    for name, text in numbers.items():
        if not text.isdecimal():
            raise ValueError(f"{name} is {text!r}; it must be a whole number")
    job, step, node = map(int, numbers.values())
    tasks = tasks_per_node(given.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    if node >= len(tasks):
        raise ValueError(
            f"SLURM_NODEID is {node}, but SLURM_STEP_TASKS_PER_NODE has {len(tasks)} nodes; set "
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT yourself"
        )
    on_one_node = given.get("SLURM_STEP_NUM_NODES") == "1"
    hosts = "127.0.0.1" if on_one_node else given.get("SLURM_STEP_NODELIST", "127.0.0.1")
    return {
        "RANK": given["SLURM_PROCID"],
        "WORLD_SIZE": given["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": given.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(tasks[node]),
        "MASTER_ADDR": first_host(hosts),
        "MASTER_PORT": str(FIRST_SLURM_PORT + (PORTS_A_JOB * job + step) % NUM_SLURM_PORTS),
    }


def first_host(hosts: str) -> str:
    """The first host of a list in Slurm's short form.

    Example:
        >>> first_host("gpu[003-007,12],cpu1"), first_host("rack[0-1]node[4,6]"), first_host("vm")
        ('gpu003', 'rack0node4', 'vm')
    """
    match = re.match(r"(?:[^\[\],]|\[[^\]]*\])+", hosts)
    if match is None:
        raise ValueError(f"no host in the Slurm host list {hosts!r}; set MASTER_ADDR yourself")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0])


def tasks_per_node(text: str) -> list[int]:
    """The number of tasks of each node, from Slurm's short form.

    Example:
        >>> tasks_per_node("4(x2),3")
        [4, 4, 3]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(
                f"SLURM_STEP_TASKS_PER_NODE is {text!r}, which is not of the form 4(x2),3; set "
                "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT yourself"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def visible_and_hidden() -> Mapping[str, str]:
    """The environment with what is hidden from others."""
    return {**os.environ, **_hidden}


@contextmanager
def hidden() -> Iterator[None]:
    """Within it ``os.environ`` names no other workers; at its end everything is back.

    It is the process's environment: threads see it too, and processes that are started meanwhile
    inherit it. Within another one it does nothing.

    Example:
        >>> os.environ["SLURM_PROCID"] = "3"
        >>> with hidden():
        ...     "SLURM_PROCID" in os.environ, visible_and_hidden()["SLURM_PROCID"]
        (False, '3')
        >>> os.environ.pop("SLURM_PROCID")
        '3'
    """
    taken = {
        name: value
        for name, value in os.environ.items()
        if name in NAMES or name.startswith(PREFIXES)
    }
    for name in taken:
        del os.environ[name]
    _hidden.update(taken)
    try:
        yield
    finally:
        for name, value in taken.items():
            os.environ[name] = value
            del _hidden[name]
