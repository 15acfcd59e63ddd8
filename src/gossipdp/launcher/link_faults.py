"""``LinkFaults``: cuts the links between the workers of one supervisor, and takes them down.

A link that is cut has its connections shut down, once. While a link is down, the kernel drops what
arrives by any connection between its two workers. They may dial again meanwhile: a new connection
lets messages pass until it is found, about 10 ms later.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

# New connections of links that are down are looked for once in this time; sooner if such a link
# has no connection, since its workers dial.
LOOK_EVERY_S, LOOK_SOON_S = 0.05, 0.01


class Connection(Protocol):
    """A connection between two workers; nothing happens to one that has ended."""

    def cut(self) -> None:
        """Shut it down. Raises OSError."""

    def block(self) -> None:
        """Let it lose all that is sent. Raises OSError."""

    def unblock(self) -> None:
        """Let all pass again. Raises OSError."""


Link = tuple[int, int]
"""The ranks of two workers."""
Pids = Mapping[int, Sequence[int]]
"""By rank, the processes of the workers here; none of a worker that does not run."""
Find = Callable[[Pids], Mapping[Link, Sequence[Connection]]]
"""Returns the connections between workers; raises OSError if the system does not show them."""


@dataclass
class _Down:
    """A link that is down.

    blocked: its connections so far, also those that have ended.
    is_dialled: it had none at the last look, though both workers ran.
    """

    until_s: float
    blocked: set[Connection] = field(default_factory=set)
    is_dialled: bool = False

    def block(self, connections: Collection[Connection]) -> None:
        for connection in set(connections) - self.blocked:
            self.blocked.add(connection)  # first: one of its ends may be blocked, the other not
            connection.block()

    def unblock(self) -> None:
        for connection in self.blocked:
            with suppress(OSError):  # what could be blocked can be unblocked
                connection.unblock()


class LinkFaults:
    """The links that are down. Only the supervisor's loop touches them, as all of its injector.

    Args:
        find: finds the connections of workers.
        clock: seconds.
    """

    def __init__(self, find: Find, clock: Callable[[], float]) -> None:
        self._find, self._clock = find, clock
        self._down: dict[Link, _Down] = {}
        self._looked_s = -math.inf

    def due_s(self) -> float:
        """Return when :meth:`step` is to be called."""
        if not self._down:
            return math.inf
        return min(self._look_s(), *(each.until_s for each in self._down.values()))

    def inject(self, links: Sequence[Link], pids: Pids, for_s: float | None) -> Link | str:
        """Take down the first of the links that there is, or cut it if ``for_s`` is None.

        Returns:
            the link; or why the first one cannot be cut.
        """
        down = _Down(math.inf)
        try:
            found = self._connections(links, pids)
            obstacles = [self._obstacle(link, pids, found) for link in links]
            if "" not in obstacles:
                return next(iter(obstacles), "")
            link = links[obstacles.index("")]
            if for_s is None:
                for connection in found[link]:
                    connection.cut()
            else:
                down.block(found[link])
        except OSError as error:
            down.unblock()
            return f"the system does not allow it ({error.strerror})"
        if for_s is not None:
            self._looked_s = self._clock()
            down.until_s = self._looked_s + for_s
            self._down[link] = down
        return link

    def step(self, pids: Pids) -> tuple[list[Link], str]:
        """Do what is due; return the links that are up again, and what has gone wrong."""
        now = self._clock()
        over = [link for link, down in self._down.items() if now >= down.until_s]
        for link in over:
            self._down.pop(link).unblock()
        if not self._down or now < self._look_s():
            return over, ""
        try:
            for link, connections in self._connections(self._down, pids).items():
                self._down[link].block(connections)
                both_run = all(pids.get(rank) for rank in link)
                self._down[link].is_dialled = both_run and not connections
        except OSError as error:
            self.release()
            return over, f"links cannot be kept down ({error.strerror})"
        self._looked_s = self._clock()
        return over, ""

    def release(self) -> None:
        """Let all links be up."""
        while self._down:
            self._down.popitem()[1].unblock()

    def _look_s(self) -> float:
        is_dialled = any(each.is_dialled for each in self._down.values())
        return self._looked_s + (LOOK_SOON_S if is_dialled else LOOK_EVERY_S)

    def _connections(self, links: Collection[Link], pids: Pids) -> dict[Link, list[Connection]]:
        """Return the connections of these links."""
        if not links:
            return {}
        ranks = {rank for link in links for rank in link} & pids.keys()
        found = self._find({rank: pids[rank] for rank in ranks})
        return {link: [*found.get(link, ()), *found.get(link[::-1], ())] for link in links}

    def _obstacle(self, link: Link, pids: Pids, found: Mapping[Link, Sequence[Connection]]) -> str:
        """Return why this link cannot be cut or taken down, "" if it can."""
        for rank in link:
            if rank not in pids:
                return f"worker {rank} does not run here; both must"
            if not pids[rank]:
                return f"worker {rank} does not run"
        if link in self._down or link[::-1] in self._down:
            return "it is down already"
        return "" if found[link] else "the two are not connected"
