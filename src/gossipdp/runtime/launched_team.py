"""``LaunchedTeam``: one worker, and the launcher that started its supervisor knows its rank.

Under torchrun, srun or an indexed Job each process of the launcher's supervises one worker, so
that the launcher does not see the worker die. The supervisors meet where the workers do, at
MASTER_ADDR:MASTER_PORT. The store there is torchrun's, or else rank 0's supervisor hosts it.
"""

from __future__ import annotations

from typing import final

from gossipdp.runtime.environment import Environment, worker_variables
from gossipdp.runtime.farewell import Farewell, alive_key
from gossipdp.runtime.store import HostedStore, RemoteStore, ready_key
from gossipdp.runtime.team import Team


@final
class LaunchedTeam(Team):
    """The run of the worker that ``environment`` describes.

    Args:
        environment: what the launcher told, with a store.
        secret: the workers' common secret, if the user chose one.
        host: where rank 0 hosts the store, unless the launcher does; by default MASTER_ADDR.

    Raises:
        RendezvousError: the store's port is in use, or the address is not of this machine.
    """

    def __init__(self, environment: Environment, secret: str | None, host: str | None) -> None:
        assert environment.store_host is not None
        self.others_elsewhere = environment.num_workers > 1
        self._round = 0
        self.run_id = environment.run_id if environment.unique_run_id else None
        self.secret = secret
        self._environment = environment
        self._prefix = environment.key_prefix
        self._address = (environment.store_host, environment.store_port)
        self._hosted: HostedStore | None = None
        if environment.rank == 0 and not environment.agent_store:
            self._hosted = HostedStore(host or environment.store_host, environment.store_port)
        alive = alive_key(self._prefix, environment.rank)
        self._watched = RemoteStore(
            *self._address,
            f"{self._prefix}failed",
            renewed_key=alive if environment.agent_store else None,
        )
        ranks = range(environment.num_workers)
        self._watched.await_all([ready_key(self._prefix, rank) for rank in ranks])

    def rank(self, local_rank: int) -> int:
        """See the base class."""
        return self._environment.rank

    def variables(self, local_rank: int) -> dict[str, str]:
        """See the base class; the local rank is the launcher's, which has others on this host."""
        environment, (host, port) = self._environment, self._address
        told = worker_variables(
            environment.rank,
            environment.num_workers,
            host=host,
            port=port,
            run_id=self.run_id,
            secret=self.secret,
            local_rank=environment.local_rank,
            num_local_workers=environment.num_local_workers,
            round_number=environment.restart_count + self._round,
        )
        del told["GROUP_RANK"]  # which host this is, nobody has told
        return {**told, "TORCHELASTIC_RUN_ID": environment.run_id}

    def rejoin_variables(self, local_rank: int, rank: int | None) -> dict[str, str]:
        """See the base class."""
        return self.variables(local_rank)

    def open(self) -> None:
        """See the base class."""
        if self._hosted is not None:
            self._hosted.open_in_background()
        self._watched.open_in_background()

    def close(self) -> None:
        """See the base class."""
        self._watched.close()
        if self._hosted is not None:
            self._hosted.close()

    def has_begun(self, begun: set[int]) -> bool:
        """See the base class; where our worker began a moment ago, the others are awaited."""
        return self._watched.have_begun(ours=bool(begun))

    def check(self) -> str | None:
        """See the base class."""
        if self._hosted is not None:
            self._hosted.raise_error()
        self._watched.raise_error()
        return self._watched.noticed

    def tell_failed(self, reason: str) -> None:
        """See the base class."""
        self._watched.put_notice(reason)

    def begin_anew(self) -> None:
        """See the base class: the only worker of a run, which meets nobody."""
        assert not self.others_elsewhere, "it cannot be known here that nobody is left"
        self._round += 1

    def published_addresses(self) -> dict[int, tuple[str, int]]:
        """See the base class."""
        return {}

    def tell_ended(self, *, wait: bool) -> list[int]:
        """Let the other supervisors know that this one ends; with ``wait``, after all of them.

        Under another launcher than torchrun nothing is to be told.

        Returns:
            As :meth:`Farewell.say`.
        """
        environment = self._environment
        if not environment.agent_store:
            return []
        farewell = Farewell(*self._address, self._prefix, environment.rank, environment.num_workers)
        return farewell.say(wait=wait)
