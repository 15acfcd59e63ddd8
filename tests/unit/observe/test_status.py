import math
import socket
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from links import listening
from prometheus_client.parser import text_string_to_metric_families
from run_processes import load_script
from waiting import LONGEST_S, pause, wait_until

from gossipdp.launcher.environment import show_address
from gossipdp.observe import status
from gossipdp.observe.status import metrics_text
from gossipdp.protocol.actions import Notice

ABOUT = 0, "7f", "a2cid2", 'a "graph"\\of\nmine', 0.5, "node", 4000, "training", 900
COUNTS = {"gradient_steps": 10, "samples": 320, "bytes_sent": 1000, "shared_bytes_sent": 2000}
EXCHANGES = {"exchanges_initiated": 3, "exchanges_answered": 4, "exchanges_by_neighbour": {0: 7}}
LINK = {"is_neighbour": True, "heard_ago_s": 0.1, "exchange_seconds": 0.02}
MEMBERS = (
    status.MemberStatus(0, 0, "training", status_address="10.0.0.1:9400", **LINK),
    status.MemberStatus(1, 0, "training"),
    status.MemberStatus(2, 1, "lost", is_silent=True, is_neighbour=True),
    status.MemberStatus(3, 0, "training", heard_ago_s=0.2),
)
STATUS = status.WorkerStatus(
    *ABOUT,
    **COUNTS | EXCHANGES,
    rank=1,
    world_size=3,
    at_s=100.0,
    step_seconds=0.25,
    logged={"loss": 0.75, "lr": 1e-05, "norm": None},
    members=MEMBERS,
    noticed=(Notice(2, "lost", 96.5, 1, 4.5),),
)


def test_a_reader_ignores_what_it_does_not_know_and_nan_is_unknown():
    assert status.decode_status(msgspec.json.encode(STATUS)) == STATUS
    fields = msgspec.json.decode(msgspec.json.encode(STATUS)) | {"mood": "good"}
    assert status.decode_status(msgspec.json.encode(fields)) == STATUS
    poisoned = msgspec.structs.replace(STATUS, edge_distance=math.nan, logged={"loss": math.inf})
    decoded = status.decode_status(msgspec.json.encode(poisoned))
    assert math.isnan(decoded.edge_distance)
    assert decoded.logged == {"loss": None}


def test_threads_that_decode_first_find_the_types_built():
    fresh, called = load_script(Path(status.__file__)), []
    sys.setprofile(lambda frame, *_: called.append(frame.f_code.co_name))
    fresh.decode_status(msgspec.json.encode(STATUS))
    sys.setprofile(None)
    assert {"decode", "get_class_annotations"} & {*called} == {"decode"}  # the latter is msgspec's


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[" * 100_000, b"\xff", b'{"rank":"one"}'], ids=lambda data: data[:8]
)
def test_what_is_no_status_is_refused(data):
    with pytest.raises(ValueError, match="no worker's status"):
        status.decode_status(data)


def test_prometheus_reads_all_of_it():
    families = list(text_string_to_metric_families(metrics_text(STATUS).decode()))
    samples = [sample for family in families for sample in family.samples]
    values = {(each.name, *sorted(each.labels.items())): each.value for each in samples}
    rank = ("rank", "1")
    assert values["gossipdp_gradient_steps_total", rank] == 10
    assert values["gossipdp_step_seconds", rank] == 0.25
    assert values["gossipdp_logged", ("name", "lr"), rank] == 1e-05
    assert values["gossipdp_exchanges_answered_total", rank] == 4
    assert values["gossipdp_exchanges_by_neighbour_total", ("neighbour", "0"), rank] == 7
    assert values["gossipdp_shared_bytes_sent_total", rank] == 2000
    assert values["gossipdp_neighbour_exchange_seconds", ("neighbour", "0"), rank] == 0.02
    assert values["gossipdp_link_up", ("neighbour", "2"), rank] == 0
    assert ("gossipdp_link_up", ("neighbour", "3"), rank) not in values, "it is in no exchange"
    assert values["gossipdp_members", rank, ("state", "lost")] == 1
    assert values["gossipdp_members_silent", rank] == 1
    # What is not known is left out, whole metrics too.
    assert ("gossipdp_logged", ("name", "norm"), rank) not in values
    assert not any(key[0] == "gossipdp_edge_distance" for key in values)
    (about,) = next(family for family in families if family.name == "gossipdp_info").samples
    assert about.labels["graph"] == STATUS.graph
    for family in families:
        assert family.name.startswith("gossipdp_")
        assert family.documentation
        # The parser drops the suffix of a counter's name, and of no other's.
        is_total = {sample.name.endswith("_total") for sample in family.samples}
        assert is_total == {family.type == "counter"}


def test_a_worker_is_asked_and_what_answers_something_else_is_none(serve, monkeypatch):
    def ask(body: bytes) -> status.WorkerStatus:
        return status.ask(show_address(*serve(lambda: body).address))

    assert ask(msgspec.json.encode(STATUS) + b"\r\n\r\n") == STATUS
    with pytest.raises(ValueError, match="more than 4194304 bytes"):
        ask(b" " * (4 << 20))
    monkeypatch.setattr(status, "STATUS_PATH", "/elsewhere")
    with pytest.raises(ValueError, match="answers 404"):
        ask(b"{}")


def test_what_is_no_http_and_nobody():
    def shout(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"hello there\r\n\r\n")

    with listening(shout) as address, pytest.raises(ValueError, match="no worker's status port"):
        status.ask(show_address(*address))
    with pytest.raises(ConnectionRefusedError):
        status.ask(show_address(*address))


@pytest.mark.parametrize("piece", [b"more: headers\r\n", b"\r\n more of the body"])
def test_an_answer_that_trickles_in_has_one_deadline_in_all(piece):
    def trickle(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.0 200 OK\r\n")
        for _ in range(500):
            connection.sendall(piece)
            pause()

    with listening(trickle) as address, pytest.raises(TimeoutError):
        status.ask(show_address(*address), timeout_s=0.2)


def test_one_that_hangs_delays_no_other():
    release, before = threading.Event(), set(threading.enumerate())
    asked: list[str] = []

    def slow_ask(address: str) -> status.WorkerStatus:
        asked.append(address)
        if address == "slow:1":
            release.wait(LONGEST_S)
        if address == "gone:1":
            raise ConnectionRefusedError(111, "refused")
        return STATUS

    with status.StatusPoll(slow_ask) as poll:
        answers: dict[str, object] = {}
        addresses = ["quick:1", "slow:1", "gone:1"]
        wait_until(
            lambda: answers.keys() >= {"quick:1", "gone:1"},
            lambda: f"two answer: {answers}",
            lambda: answers.update(poll.answers(addresses, 0.02)),
        )
        assert answers["quick:1"] is STATUS
        assert isinstance(answers["gone:1"], ConnectionRefusedError)
        assert "slow:1" not in answers
        # It is not asked a second time while the first question is open.
        assert "slow:1" not in poll.answers(["quick:1", "slow:1"], 0.02)
        release.set()
        assert poll.answers([], LONGEST_S)["slow:1"] is STATUS
    assert asked.count("slow:1") == 1
    wait_until(lambda: set(threading.enumerate()) <= before, "the threads that ask have ended")
