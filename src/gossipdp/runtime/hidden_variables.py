"""The launcher's variables, hidden for a while from libraries that would start their own run.

Accelerate, the Trainer of transformers and Lightning read RANK, WORLD_SIZE and their like when
they are set up, start ``torch.distributed``, average gradients and give each worker a share of the
data. Under gossipdp each worker is a training of its own to them: what they must not see is taken
out of the environment, and :meth:`~gossipdp.runtime.environment.Environment.read` finds it still.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# torchrun's and ours; those of Slurm's srun, of PMI, Open MPI and MVAPICH, which the frameworks
# take for a launcher's as well.
PREFIXES = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_")
NAMES = frozenset(
    f"{group}{kind}"
    for group in ("", "LOCAL_", "GROUP_", "ROLE_")
    for kind in ("RANK", "WORLD_SIZE")
) | {
    "MASTER_ADDR",
    "MASTER_PORT",
    "ROLE_NAME",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NTASKS",
}

_hidden: dict[str, str] = {}


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
