"""What Slurm and Kubernetes tell a process about itself, in torchrun's words.

Slurm's srun sets SLURM_* for each task of a step; the shell of an sbatch script has no
SLURM_STEP_NUM_TASKS, so that what runs there without srun stays one worker. An indexed Job of
Kubernetes sets JOB_COMPLETION_INDEX; how many pods there are its manifest must say (WORLD_SIZE).

Sources: srun(1), "Output environment variables"; kubernetes.io, "Jobs", completion mode Indexed.
"""

import re
from collections.abc import Mapping

LOOPBACK = "127.0.0.1"
# Below the ports that Linux gives to whoever asks for any (32768 and up).
FIRST_SLURM_PORT, NUM_SLURM_PORTS = 20000, 10000
PORTS_A_JOB = 16


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
        return slurm_variables(given) | given
    if "JOB_COMPLETION_INDEX" in given and "WORLD_SIZE" in given:
        rank = given["JOB_COMPLETION_INDEX"]
        return {"RANK": rank, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} | given
    return given


def slurm_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """RANK and the like of one task of a Slurm step.

    The workers meet at the step's first node, on a port that follows from the job and the step:
    20000 + (16 · job + step) mod 10000.

    Raises:
        ValueError: a variable has a form that is not known.

    Example:
        >>> step = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}
        >>> step |= {"SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
        >>> step |= {"SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_NUM_NODES": "2"}
        >>> slurm_variables(step | {"SLURM_JOB_ID": "3", "SLURM_STEP_ID": "0"})["MASTER_ADDR"]
        'gpu07'
    """
    first_node = LOOPBACK
    if variables.get("SLURM_STEP_NUM_NODES") != "1":
        first_node = first_host(variables.get("SLURM_STEP_NODELIST", LOOPBACK))
    job, step = _number(variables, "SLURM_JOB_ID"), _number(variables, "SLURM_STEP_ID")
    tasks = tasks_per_node(variables.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    node = _number(variables, "SLURM_NODEID")
    if node >= len(tasks):
        raise ValueError(
            f"SLURM_NODEID is {node}, but SLURM_STEP_TASKS_PER_NODE has {len(tasks)} nodes; set "
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT yourself"
        )
    return {
        "RANK": variables["SLURM_PROCID"],
        "WORLD_SIZE": variables["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": variables.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(tasks[node]),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": first_node,
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


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "0")
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r}; it must be a whole number")
    return int(text)
