"""Where the workers of a run under Ray meet, and where those that Ray starts again find the others.

Knows nothing of Ray, which keeps it as an actor of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from gossipdp.errors import RendezvousError
from gossipdp.launcher.environment import identity_variables, join_variables
from gossipdp.launcher.team import Team


class Meeting:
    """Hosts the store of one run, and remembers the latest addresses.

    Args:
        num_workers: of the run.
        host: an address of this machine that the workers reach.

    Raises:
        RendezvousError: the address is not of this machine.
    """

    def __init__(self, num_workers: int, host: str) -> None:
        self._team = Team.on_one_host(num_workers, host)
        self._team.open()
        self._num_starts = [0] * num_workers
        self._addresses: dict[int, tuple[str, int]] = {}

    def variables(self, rank: int) -> dict[str, str]:
        """What the worker must know that starts now; from its second start on, to join the others.

        Raises:
            RendezvousError: it starts again, but the run had not begun.
        """
        num_restarts = self._num_starts[rank]
        self._num_starts[rank] += 1
        own = self._team.variables(rank)
        # Ray gives each worker devices of its own, and says nothing of others on its host.
        own |= {"LOCAL_RANK": "0"}
        del own["LOCAL_WORLD_SIZE"], own["GROUP_RANK"]
        if num_restarts == 0:
            return own
        if not self.has_begun():
            raise RendezvousError(
                f"worker {rank} died before all workers had begun to train; look at its output"
            )
        others = [address for other, address in self._addresses.items() if other != rank]
        identity = identity_variables(self._team.run_id, self._team.secret)
        return own | identity | join_variables(others, num_restarts)

    def has_begun(self) -> bool:
        """Whether all workers have met and train."""
        assert self._team.hosted is not None
        return self._team.hosted.have_all_begun()

    def note_addresses(self, addresses: Mapping[int, tuple[str, int]]) -> None:
        """Where a worker says that the live ones are."""
        self._addresses = dict(addresses)

    def close(self) -> None:
        """End the store."""
        self._team.close()
