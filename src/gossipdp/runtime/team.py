"""The workers of one run as one supervisor knows them: what it tells its own, and who has begun.

Team (the seam) ← HostingTeam    this supervisor hosts the store: one host, or the first of several
                  RemoteTeam     another host's supervisor hosts it
                  JoiningTeam    a run that goes on already; no store
"""

from __future__ import annotations

import abc
import logging
import secrets
from collections.abc import Sequence
from typing import final

import msgspec

from gossipdp.errors import RendezvousError
from gossipdp.runtime.environment import identity_variables, join_variables, worker_variables
from gossipdp.runtime.store import HostedStore, RemoteStore, arrival_key, ready_key

logger = logging.getLogger("gossipdp.runtime")


class Team(abc.ABC):
    """A supervisor's view of its run; ranks are of the whole run, local ranks of this host.

    Attributes:
        run_id, secret: None while only the workers know.
        others_elsewhere: whether workers of this run may live on other hosts.
    """

    run_id: str | None
    secret: str | None
    others_elsewhere: bool

    @abc.abstractmethod
    def rank(self, local_rank: int) -> int | None:
        """The rank in the run; None for one that is given its rank by a live worker."""

    @abc.abstractmethod
    def variables(self, local_rank: int) -> dict[str, str]:
        """What a worker must know that starts when this supervisor does."""

    @abc.abstractmethod
    def rejoin_variables(self, local_rank: int, rank: int | None) -> dict[str, str]:
        """What one must know, besides live addresses, that comes back to the run."""

    @abc.abstractmethod
    def open(self) -> None:
        """Begin to answer or to listen; called when the workers have been started."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the store."""

    @abc.abstractmethod
    def has_begun(self, begun: set[int]) -> bool:
        """Whether all workers train, where ``begun`` are the local ranks that said so."""

    @abc.abstractmethod
    def check(self) -> str | None:
        """Why the run has ended on another host before it began; None: it has not.

        Raises:
            Exception: the store could not be opened here.
        """

    @abc.abstractmethod
    def tell_failed(self, reason: str) -> None:
        """Let the other hosts know that the run ends here before it has begun."""

    @abc.abstractmethod
    def begin_anew(self) -> None:
        """Prepare that all workers, none of whom is left anywhere, meet again."""

    @abc.abstractmethod
    def published_addresses(self) -> dict[int, tuple[str, int]]:
        """(host, port) by rank, as known without the workers' own reports; empty if unknown."""


class _Arrival(msgspec.Struct):
    """What of a worker's publication matters here."""

    host: str = ""
    port: int = 0


class _StoreTeam(Team):
    """Workers that meet at a store, the same number on every host."""

    def __init__(self, num_local: int, num_nodes: int, node_rank: int) -> None:
        if num_nodes < 1:
            raise ValueError(f"--nnodes is {num_nodes}; it must be at least 1")
        if not 0 <= node_rank < num_nodes:
            raise ValueError(
                f"--node-rank is {node_rank}; with --nnodes {num_nodes} it must be in "
                f"0..{num_nodes - 1}"
            )
        self.others_elsewhere = num_nodes > 1
        self._num_local, self._num_workers = num_local, num_local * num_nodes
        self._node_rank = node_rank
        self._round = 0

    @property
    @abc.abstractmethod
    def _address(self) -> tuple[str, int]:
        """Of the store."""

    @property
    def _prefix(self) -> str:
        return f"gossipdp/{self.run_id or 'default'}/{self._round}/"

    @property
    def _failed_key(self) -> str:
        return f"{self._prefix}failed"

    def _ready_keys(self) -> list[str]:
        return [ready_key(self._prefix, rank) for rank in range(self._num_workers)]

    def rank(self, local_rank: int) -> int:
        """See the base class."""
        return self._node_rank * self._num_local + local_rank

    def variables(self, local_rank: int) -> dict[str, str]:
        """See the base class."""
        host, port = self._address
        return worker_variables(
            self.rank(local_rank),
            self._num_workers,
            host=host,
            port=port,
            run_id=self.run_id,
            secret=self.secret,
            local_rank=local_rank,
            num_local_workers=self._num_local,
            node_rank=self._node_rank,
            round_number=self._round,
        )

    def rejoin_variables(self, local_rank: int, rank: int | None) -> dict[str, str]:
        """See the base class."""
        return self.variables(local_rank)


@final
class HostingTeam(_StoreTeam):
    """The store is here, and has the address under which the workers of all hosts reach it.

    With one host the run's id and secret are chosen here; with several the workers agree on them,
    since this supervisor does not talk to the others.

    Raises:
        ValueError: the number of hosts, or this one's, is impossible.
        RendezvousError: the store's port is in use, or the address is not of this machine.
    """

    def __init__(
        self, num_local: int, host: str, port: int, secret: str | None, *, num_nodes: int = 1
    ) -> None:
        super().__init__(num_local, num_nodes, 0)
        alone = num_nodes == 1
        self.run_id = secrets.token_hex(8) if alone else None
        self.secret = secret or (secrets.token_hex(16) if alone else None)
        self._store = HostedStore(host, port)
        self._has_begun = False

    @property
    def _address(self) -> tuple[str, int]:
        return self._store.host, self._store.port

    def open(self) -> None:
        """See the base class; in a thread, since ``torch`` is imported."""
        self._store.open_in_background()

    def open_here(self) -> None:
        """:meth:`open` in the calling thread; it takes as long as the import of ``torch``."""
        self._store.open()

    def close(self) -> None:
        """See the base class."""
        self._store.close()

    def has_begun(self, begun: set[int]) -> bool:
        """See the base class; once it is so it stays, whatever becomes of the store."""
        self._has_begun = (
            self._has_begun
            or len(begun) == self._num_workers
            or self._store.have_set(self._ready_keys())
        )
        return self._has_begun

    def check(self) -> str | None:
        """See the base class; nothing is asked of the store, or heard, once the run has begun.

        Whoever reaches the store may write there that the run ended.
        """
        self._store.raise_error()
        if not self.others_elsewhere or self.has_begun(set()):
            return None
        return self._store.text(self._failed_key)

    def tell_failed(self, reason: str) -> None:
        """See the base class."""
        if self.others_elsewhere:
            self._store.put(self._failed_key, reason)

    def begin_anew(self) -> None:
        """See the base class: a new round's keys are new."""
        self._round += 1
        self._has_begun = False

    def published_addresses(self) -> dict[int, tuple[str, int]]:
        """See the base class."""
        found = {}
        for rank in range(self._num_workers):
            try:
                text = self._store.text(arrival_key(self._prefix, 0, rank))
                if text is not None:
                    arrival = msgspec.json.decode(text, type=_Arrival)
                    found[rank] = (arrival.host, arrival.port)
            except (RuntimeError, msgspec.MsgspecError) as error:
                # Not needed where the workers' own reports have come.
                logger.warning("no address of worker %d in the store: %s", rank, error)
        return {rank: address for rank, address in found.items() if address[1]}


@final
class RemoteTeam(_StoreTeam):
    """The store is on another host; what it holds is looked at in a thread until all have begun."""

    def __init__(
        self,
        num_local: int,
        host: str,
        port: int,
        secret: str | None,
        *,
        num_nodes: int,
        node_rank: int,
    ) -> None:
        super().__init__(num_local, num_nodes, node_rank)
        self.run_id, self.secret = None, secret
        self._store = RemoteStore(host, port, self._failed_key)
        self._store.await_all(self._ready_keys())

    @property
    def _address(self) -> tuple[str, int]:
        return self._store.host, self._store.port

    def open(self) -> None:
        """See the base class."""
        self._store.open_in_background()

    def close(self) -> None:
        """See the base class."""
        self._store.close()

    def has_begun(self, begun: set[int]) -> bool:
        """See the base class; where all of ours began a moment ago, the others are awaited."""
        return self._store.have_begun(ours=len(begun) == self._num_local)

    def check(self) -> str | None:
        """See the base class."""
        self._store.raise_error()
        return self._store.noticed

    def tell_failed(self, reason: str) -> None:
        """See the base class."""
        self._store.put_notice(reason)

    def begin_anew(self) -> None:
        """See the base class; it cannot be known here that nobody is left."""
        raise AssertionError

    def published_addresses(self) -> dict[int, tuple[str, int]]:
        """See the base class."""
        return {}


@final
class JoiningTeam(Team):
    """Workers that join a run which goes on, each by any of the addresses given.

    A worker that fails before all of these have joined ends the others: what is wrong is wrong for
    all of them.
    """

    others_elsewhere = True

    def __init__(
        self, addresses: Sequence[tuple[str, int]], run_id: str, secret: str | None
    ) -> None:
        if not addresses:
            raise RendezvousError("no address to join")
        if not secret:
            raise ValueError(
                "a worker joins a run only with its secret: give --secret-file (or "
                "GOSSIPDP_SECRET) as the run was given it"
            )
        self.run_id: str = run_id
        self.secret: str = secret
        self._addresses = list(addresses)
        self._num_local = 0

    def rank(self, local_rank: int) -> None:
        """See the base class."""
        return

    def variables(self, local_rank: int) -> dict[str, str]:
        """See the base class."""
        self._num_local = max(self._num_local, local_rank + 1)
        return {
            **self.rejoin_variables(local_rank, None),
            **join_variables(self._addresses, 0),
        }

    def rejoin_variables(self, local_rank: int, rank: int | None) -> dict[str, str]:
        """See the base class."""
        variables = {"LOCAL_RANK": str(local_rank), **identity_variables(self.run_id, self.secret)}
        return variables if rank is None else {**variables, "RANK": str(rank)}

    def open(self) -> None:
        """See the base class: there is no store."""

    def close(self) -> None:
        """See the base class."""

    def has_begun(self, begun: set[int]) -> bool:
        """See the base class."""
        return len(begun) >= self._num_local

    def check(self) -> None:
        """See the base class."""
        return

    def tell_failed(self, reason: str) -> None:
        """See the base class: the run does not depend on its joiners."""

    def begin_anew(self) -> None:
        """See the base class; the run goes on without us."""
        raise AssertionError

    def published_addresses(self) -> dict[int, tuple[str, int]]:
        """See the base class; negative ranks stand for unknown ones."""
        return {-1 - index: address for index, address in enumerate(self._addresses)}
