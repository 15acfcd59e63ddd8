"""Asking a run for its members, on a clock and a network of the test's own."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from gossipdp.errors import RefusedError, RendezvousError
from gossipdp.gossip import joining
from gossipdp.gossip.joining import ask_members, has_ended
from gossipdp.links.handshake import FIRST_VISITOR_RANK, LAST_VISITOR_RANK, Identity, Refusal
from gossipdp.protocol.members import Member, Status
from gossipdp.protocol.messages import AskMembers, Envelope, Members, decode, encode

ADDRESSES = [("127.0.0.1", 4000), ("127.0.0.2", 4000)]
BEGINS_S, TIMEOUT_S = 1000.0, 60.0


def members(**changes: Any) -> bytes:
    alive = (Member(0, 2, 7), Member(1, 0, 8))
    told = {"num_workers": 2, "is_ending": False, "members": alive, "progress": ()}
    return encode(Envelope(Members(**told | changes)))


class Network:
    """Each dial ends as ``answers`` says, in the order of the addresses; time passes in waits.

    The first rank that is drawn is the lowest, and each one after it the highest.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: bytes | Refusal | bool | None):
        self.now_s = BEGINS_S
        self.fault = ""
        self.ranks: list[int] = []  # of each round whose transport was closed
        self._answers = answers
        self.known_s = BEGINS_S  # when the second address is known
        monkeypatch.setattr(joining, "TcpTransport", self._transport)
        monkeypatch.setattr(joining, "listen", lambda host, port: None)
        monkeypatch.setattr(joining, "time", SimpleNamespace(sleep=self._pass))
        drawn = SimpleNamespace(randbelow=lambda bound: bound - 1 if self.ranks else 0)
        monkeypatch.setattr(joining, "secrets", drawn)

    def _pass(self, seconds: float) -> None:
        self.now_s += seconds
        assert self.now_s < BEGINS_S + TIMEOUT_S + 0.6, "it asks for ever"

    def _transport(self, handler: Any, identity: Identity, *_: object, tls: None) -> Any:
        dials: list[tuple[str, int]] = []

        def poll(timeout_s: float) -> None:
            self._pass(timeout_s)
            while dials:
                address = dials.pop(0)
                self._end(handler, address, self._answers[ADDRESSES.index(address)])

        return SimpleNamespace(
            dial=lambda peer, *address: dials.append(address),
            dial_fault=self.fault,
            poll=poll,
            close=partial(self.ranks.append, identity.rank),
        )

    def _end(self, handler: Any, address: tuple[str, int], answer: Any) -> None:
        def control(data: bytes) -> None:
            assert decode(data).message == AskMembers()
            handler.control(link, answer)

        link = SimpleNamespace(send_control=control, close=partial(handler.link_down, None))
        match answer:
            case bytes():
                handler.link_up(link)
            case Refusal():
                handler.refused(None, answer)
            case bool():
                handler.dial_failed(None, address, answer)

    def ask(self) -> Members:
        identity = Identity(0, 0, 5, "run", "", "", "", "", "", host="127.0.0.1")
        options = {"tls": None, "timeout_s": TIMEOUT_S, "clock": lambda: self.now_s}
        return ask_members(
            lambda: ADDRESSES[: 1 + (self.now_s >= self.known_s)], identity, b"secret", **options
        )


@pytest.mark.parametrize(
    ("first", "known_s", "num_rounds"),
    [
        *((True, 0.0, 1), (b"no message", 0.0, 1), (None, 0.25, 1)),
        *((True, 0.25, 2), (b"no message", 0.25, 2)),
    ],
)
def test_an_address_that_becomes_known_is_dialled_at_once(monkeypatch, first, known_s, num_rounds):
    """The first worker stands still, has died, or says nonsense: any answer will do."""
    network = Network(monkeypatch, first, members())
    network.known_s = BEGINS_S + known_s
    assert [each.rank for each in network.ask().members] == [0, 1]
    assert network.now_s < BEGINS_S + 1.0
    assert network.ranks == [FIRST_VISITOR_RANK, LAST_VISITOR_RANK][:num_rounds]


def test_all_addresses_of_a_name_are_dialled(monkeypatch):
    """There may be no route to the first; if the other refuses, no worker is there."""
    found = [(0, 0, 0, "", address) for address in ADDRESSES]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)
    network = Network(monkeypatch)
    network.known_s = BEGINS_S + TIMEOUT_S  # one name alone
    for answers in ((False, members()), (members(), False)):
        network._answers = answers
        assert [each.rank for each in network.ask().members] == [0, 1]
    network._answers = (False, True)
    with pytest.raises(RendezvousError, match="refused the connection"):
        network.ask()


def test_an_unknown_name_is_said():
    with pytest.raises(RendezvousError, match=r"cannot join at 'no such host': .*; check"):
        joining._resolved("no such host", 4000)


@pytest.mark.parametrize(
    ("answers", "message", "num_rounds"),
    [
        ((members(is_ending=True), True), "the run is ending", 1),
        ((Refusal("secret"), False), "the secrets differ", 1),
        ((True, True), "refused the connection; the run has ended", 3),
    ],
)
def test_a_refusal_is_the_end(monkeypatch, answers, message, num_rounds):
    network = Network(monkeypatch, *answers)
    with pytest.raises((RefusedError, RendezvousError), match=message):
        network.ask()
    assert len(network.ranks) == num_rounds
    spent_s = num_rounds * 0.1 + (num_rounds - 1) * 0.3
    assert network.now_s == pytest.approx(BEGINS_S + spent_s)


@pytest.mark.parametrize(
    ("answer", "fault", "told"),
    [(None, "", ""), (False, "::1:4000: no route", r" \(::1:4000: no route\)")],
)
def test_without_an_answer_it_ends_in_time(monkeypatch, answer, fault, told):
    network = Network(monkeypatch, answer, answer)
    network.fault = fault
    with pytest.raises(RendezvousError, match=rf"was silent for 60 s{told}; the run has"):
        network.ask()
    assert network.now_s >= BEGINS_S + TIMEOUT_S
    # A silent round lasts 6 s, and one in which every dial fails a tenth.
    assert len(network.ranks) in ([10] if answer is None else range(140, 152))


@pytest.mark.parametrize(
    ("statuses", "is_over"),
    [
        ((Status.ALIVE, Status.DONE), False),
        ((Status.DONE, Status.LEFT), True),
        ((Status.LEFT, Status.DEAD), True),
        ((Status.DEAD, Status.DEAD), False),  # a joiner may have all that it needs to go on
    ],
)
def test_a_run_has_ended_if_the_others_train_no_more(statuses, is_over):
    others = [Member(rank, 0, 7, status) for rank, status in enumerate(statuses)]
    assert has_ended([*others, Member(5, 0, 7, Status.JOINING)], 5) == is_over
