"""``gossipdp run`` without ``-n``: the one worker whose rank another launcher has told.

Under torchrun, ``torchrun --nproc-per-node 4 -m gossipdp run train.py``; under Slurm, ``srun
gossipdp run train.py``.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gossipdp.runtime.clusters import with_launcher

if TYPE_CHECKING:
    from gossipdp.runtime.launched_team import LaunchedTeam


def is_launched(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, srun or an indexed Job started this process and says its rank.

    Example:
        >>> is_launched({"RANK": "1"}), is_launched({"SLURM_PROCID": "0"})
        (True, False)
    """
    return "RANK" in with_launcher(variables)


def launched_team(secret: str | None, host: str | None) -> "LaunchedTeam":
    """The run of this process's worker.

    Raises:
        ValueError: the launcher's variables are not complete.
        RendezvousError: rank 0 cannot host the store at its address.
    """
    from gossipdp.runtime.environment import Environment
    from gossipdp.runtime.launched_team import LaunchedTeam

    environment = Environment.read()
    return LaunchedTeam(environment, secret, host or environment.host)


def launched_variables() -> dict[str, str]:
    """How many threads this worker has, where the launcher has others on this host."""
    from gossipdp.runtime.environment import Environment
    from gossipdp.runtime.launcher import available_cores

    num_local = Environment.read().num_local_workers or 1
    return {"OMP_NUM_THREADS": str(max(1, len(available_cores()) // num_local))}
