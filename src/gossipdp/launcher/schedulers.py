"""The variables of Slurm and Kubernetes, translated to torchrun's.

Slurm's srun sets SLURM_* for each task of a step. The shell of an sbatch script has no
SLURM_STEP_NUM_TASKS, so a script that runs there without srun stays one worker. An indexed Job of
Kubernetes sets JOB_COMPLETION_INDEX; its manifest must say how many pods there are (WORLD_SIZE).

Sources: srun(1), "Output environment variables"; kubernetes.io, "Jobs", completion mode Indexed.
"""

import re
from collections.abc import Mapping

# Below the ports that Linux gives to programs that ask for any (32768 and up).
FIRST_SLURM_PORT, NUM_SLURM_PORTS, PORTS_A_JOB = 20000, 10000, 16


def with_torchrun_names(variables: Mapping[str, str]) -> dict[str, str]:
    """Return ``variables`` with torchrun's names, if Slurm or Kubernetes started this process.

    Variables that are set stay as they are. If RANK is set nothing is added: it was set nearer to
    this process.

    Raises:
        ValueError: a variable of Slurm has an unknown form.
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
    """Return RANK and the like of one task of a Slurm step.

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
    """Return the first host of a list in Slurm's short form."""
    match = re.match(r"(?:[^\[\],]|\[[^\]]*\])+", hosts)
    if match is None:
        raise ValueError(f"no host in the Slurm host list {hosts!r}; set MASTER_ADDR yourself")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0])


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node, from Slurm's short form."""
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
