"""The question to a running job for its members, before a worker joins it.

A *visitor* dials all given addresses at once, over a transport of its own, and asks every worker
that answers (``AskMembers``); the first answer is enough. It dials each address of a name, and each
that becomes known meanwhile: those before may be of workers that stand still. Its rank is drawn at
random from those that no worker has. The handshake compares model, method, rate, wire format and
time-out; the graph, which may follow from the answer, is compared when the worker links up.

A round of dials ends with an answer, with a refusal, when all addresses have failed, or after
``ROUND_S``.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from gossipdp.errors import RefusedError, RendezvousError
from gossipdp.launcher.reports import say_instead_of_traceback
from gossipdp.links.clock import since_boot_s
from gossipdp.links.handshake import FIRST_VISITOR_RANK, LAST_VISITOR_RANK, Identity, Refusal
from gossipdp.links.link import Link, LinkHandler
from gossipdp.links.sockets import listen
from gossipdp.links.tcp import TcpTransport
from gossipdp.links.tls import Tls
from gossipdp.protocol.members import Member, Status
from gossipdp.protocol.messages import AskMembers, Envelope, Members, ProtocolError, decode, encode

ROUND_S = 6.0
# A worker that was just started may not answer yet. If all addresses refuse connections so often,
# no worker is there.
MAX_ROUNDS_REFUSED = 3
PAUSE_S = 0.3
TURN_S = 0.1


class _Visitor(LinkHandler):
    """The handler of a visitor's links: it asks every peer, and keeps the first answer."""

    def __init__(self) -> None:
        self.answer: Members | None = None
        self.refusal: Refusal | None = None
        self.num_failed = 0
        self.refusing = set[tuple[str, int]]()  # no process listens at these addresses

    def link_up(self, link: Link) -> None:
        link.send_control(encode(Envelope(AskMembers())))

    def link_down(self, link: Link, reason: str) -> None:
        self.num_failed += 1

    def control(self, link: Link, data: bytes) -> None:
        try:
            message = decode(data).message
        except ProtocolError as error:
            link.close(str(error))
            return
        if isinstance(message, Members) and self.answer is None:
            self.answer = message

    def refused(self, peer: int | None, refusal: Refusal) -> None:
        self.refusal = refusal
        self.num_failed += 1

    def dial_failed(
        self, peer: int | None, address: tuple[str, int], refused_connection: bool
    ) -> None:
        self.num_failed += 1
        if refused_connection:
            self.refusing.add(address)


def has_ended(members: Iterable[Member], rank: int) -> bool:
    """Return whether the others of ``rank`` train no more, and not since all have died."""
    others = {member.status for member in members if member.rank != rank}
    return Status.ALIVE not in others and bool(others & {Status.DONE, Status.LEFT})


class RunEndingError(RefusedError):
    """A worker comes too late: the run is ending."""


def ask_members(
    addresses: Callable[[], Sequence[tuple[str, int]]],
    identity: Identity,
    secret: bytes,
    *,
    tls: Tls | None,
    timeout_s: float,
    clock: Callable[[], float] = since_boot_s,
) -> Members:
    """Ask workers at these ``addresses`` for the members of a run, before a worker joins it.

    One of them must be live, now or later. The rank and the graph of ``identity`` are not used.

    Raises:
        RefusedError: the run has other settings or another secret.
        RunEndingError: it is ending.
        RendezvousError: no worker answered.
    """
    say_instead_of_traceback()
    deadline_s = clock() + timeout_s
    rounds_refused = 0
    while True:
        rank = FIRST_VISITOR_RANK + secrets.randbelow(LAST_VISITOR_RANK - FIRST_VISITOR_RANK + 1)
        visitor = _Visitor()
        visiting = msgspec.structs.replace(identity, rank=rank, incarnation=0, graph="")
        transport = TcpTransport(visitor, visiting, secret, listen(identity.host, 0), tls=tls)
        round_ends_s = min(deadline_s, clock() + ROUND_S)
        dialled = dict[tuple[str, int], set[tuple[str, int]]]()  # the numeric ones of each
        try:
            while visitor.answer is None and clock() < round_ends_s:
                for host, port in addresses():
                    if (host, port) not in dialled:
                        dialled[host, port] = _resolved(host, port)
                        for address in dialled[host, port]:
                            transport.dial(None, *address)
                if visitor.num_failed >= sum(map(len, dialled.values())):
                    break
                transport.poll(TURN_S)
        finally:
            transport.close()
        if visitor.answer is not None and visitor.answer.is_ending:
            raise RunEndingError(
                "the run is ending: its workers average their parameters and take in no other"
            )
        if visitor.answer is not None:
            return visitor.answer
        if visitor.refusal is not None:
            raise RefusedError(f"the run does not take in this worker: {visitor.refusal}")
        # To another address of the name, such as that of IPv6, there may be no route.
        some_do_not = any(visitor.refusing.isdisjoint(each) for each in dialled.values())
        rounds_refused = 0 if some_do_not else rounds_refused + 1
        shown = ", ".join(f"{host}:{port}" for host, port in dialled)
        is_refused = rounds_refused == MAX_ROUNDS_REFUSED
        if is_refused or clock() >= deadline_s:
            fault = f" ({transport.dial_fault})" if transport.dial_fault else ""
            silent = f"was silent for {timeout_s:g} s{fault}"
            how = "refused the connection" if is_refused else silent
            raise RendezvousError(
                f"no worker to join: {shown} {how}; the run has ended, or has other addresses"
            )
        time.sleep(PAUSE_S)


def _resolved(host: str, port: int) -> set[tuple[str, int]]:
    """Return all numeric addresses; raises RendezvousError for an unknown name."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return {(str(each[4][0]), port) for each in found}
    except OSError as error:
        raise RendezvousError(f"cannot join at {host!r}: {error}; check the name") from error
