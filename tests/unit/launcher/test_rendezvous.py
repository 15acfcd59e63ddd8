import json
import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from clocks import Clock
from run_processes import free_port, listens
from torch.distributed import HashStore
from waiting import LONGEST_S, wait_until

from gossipdp.errors import RefusedError, RendezvousError
from gossipdp.launcher import rendezvous
from gossipdp.launcher.environment import Environment
from gossipdp.launcher.rendezvous import Rendezvous, RendezvousResult, Settings
from gossipdp.launcher.store import connect

SETTINGS = Settings(
    tensors=(("embedding.weight", (10, 4)), ("output.bias", (4,))),
    method="a2cid2",
    graph="ring-3",
    comm_rate="1.0",
    wire_format="float32",
)
OTHER_SHAPE = (SETTINGS.tensors[0], ("output.bias", (5,)))
SECRET, MINE = b"a secret of this test", {"run_id": "mine", "unique_run_id": True}
TLS = Path("tls")
KEYS, HERE = "gossipdp/default/0/0/", ("127.0.0.1", 1)


def environment(rank: int, num_workers: int = 3, **values: object) -> Environment:
    return Environment(rank=rank, world_size=num_workers, store_host="store", **values)


def meet(
    environments: list[Environment],
    store: HashStore | None = None,
    number: int = 0,
    random_states: str = "aaa",
) -> list[RendezvousResult]:
    """Let all workers meet, each in a thread; ``random_states``: a letter for each."""
    shared = HashStore() if store is None else store

    def one(own: Environment) -> RendezvousResult:
        part = Rendezvous(own, shared, timeout_s=LONGEST_S, number=number)
        address = "127.0.0.1", 100 + own.rank
        state, samples = random_states[own.rank], 10 * own.rank
        return part.meet(address, SETTINGS, random_state=state, known_samples=samples)

    with ThreadPoolExecutor(len(environments)) as pool:
        return list(pool.map(one, environments))


def alone(own: Environment, store: Any) -> Rendezvous:
    """Return a part in a meeting, whose clock only sleeping moves: it waits in no time."""
    clock = Clock(100.0, longest_s=1000.0)
    return Rendezvous(own, store, timeout_s=60, clock=clock, sleep=clock.sleep)


def failure(
    own: Environment, store: Any, settings: Settings = SETTINGS, kind: Any = RendezvousError
) -> str:
    with pytest.raises(kind) as raised:
        alone(own, store).meet(HERE, settings)
    return str(raised.value)


def test_the_networks_of_all_shards_are_of_one_run():
    """Another run without an id of its own has another one."""

    def run_id() -> str:
        store, found = HashStore(), set()
        for shard in range(2):
            both = [environment(rank, 2, shard=shard, num_shards=2) for rank in range(2)]
            first, second = meet(both, store)
            assert second == first
            found.add(first.run_id.removesuffix(f"-shard-{shard}-of-2"))
        (common,) = found
        return common

    first = run_id()
    assert re.fullmatch("default-[0-9a-f]{8}", first)
    assert run_id() != first


@pytest.mark.parametrize(
    ("host", "given", "warns"),
    [
        ("store", {}, True),
        ("127.0.0.1", {}, False),
        ("store", {"secret": SECRET}, False),
        ("store", {"tls": TLS}, False),
    ],
)
def test_all_learn_the_same_and_of_a_secret_that_strangers_may_read(host, given, warns, caplog):
    store = HashStore()
    environments = [replace(environment(rank, **given), store_host=host) for rank in range(3)]
    first, *others = meet(environments, store)
    assert others == [first] * 2
    assert first.addresses == {rank: ("127.0.0.1", 100 + rank) for rank in range(3)}
    assert first.known_samples == {0: 0, 1: 10, 2: 20}
    assert ("everyone who reaches the store at" in caplog.text) == warns
    published = json.loads(store.get(f"{KEYS}reference"))["secret"]
    assert first.secret == given.get("secret", (published or "").encode())
    # None is made beside a given one, or with TLS.
    assert len(published or "") == (0 if given else 32)
    assert not first.secret or first.secret.decode() not in caplog.text + repr(first)


def test_a_given_secret_and_run_id_are_kept_and_not_published():
    store = HashStore()
    environments = [environment(rank, secret=SECRET, **MINE) for rank in range(3)]
    met = meet(environments, store)
    assert {(each.secret, each.run_id) for each in met} == {(SECRET, "mine")}
    assert SECRET not in store.get("gossipdp/mine/0/0/reference")
    # A second meeting of these processes sees nothing of the first.
    assert {each.run_id for each in meet(environments, store, number=1)} == {"mine-0-1"}


@pytest.mark.parametrize(("random_states", "common"), [("aaa", "a"), ("aab", "")])
def test_all_learn_whether_they_begin_with_one_random_state(random_states, common):
    met = meet([environment(rank) for rank in range(3)], random_states=random_states)
    assert [each.common_random_state for each in met] == [common] * 3


@pytest.mark.parametrize(
    ("zeroth", "own", "change", "message"),
    [
        ({}, {}, {"method": "gossip"}, "method is 'gossip' here and 'a2cid2' on worker 0"),
        ({}, {}, {"graph": "star"}, "graph is 'star' here and 'ring-3' on worker 0"),
        ({}, {}, {"comm_rate": "2.0"}, "comm_rate is '2.0' here and '1.0' on worker 0"),
        ({}, {}, {"wire_format": "bfloat16"}, "wire_format is 'bfloat16' here and 'float32'"),
        ({}, {}, {"budget_samples": 8}, "budget_samples is 8 here and None on worker 0"),
        ({}, {}, {"timeout_s": 60.0}, "timeout_s is 60.0 here and None on worker 0"),
        ({}, {}, {"tensors": OTHER_SHAPE}, "first in tensor 1: output.bias of shape (5,) here and"),
        ({}, {}, {"tensors": SETTINGS.tensors[:1]}, "first in tensor 1: none here and output.bias"),
        ({}, {}, {"base": "5f"}, "the frozen bases differ: frozen parameters of more than twice"),
        ({"secret": b"a"}, {"secret": b"b"}, {}, "the secret differs from worker 0's"),
        ({"secret": b"a"}, {}, {}, "GOSSIPDP_SECRET is not set here and set on worker 0"),
        ({}, {"secret": b"b"}, {}, "GOSSIPDP_SECRET is set here and not set on worker 0"),
        ({"tls": TLS}, {}, {}, "TLS is not used here and used on worker 0"),
        ({}, {"world_size": 4}, {}, "WORLD_SIZE is 4 here and 3 on worker 0"),
    ],
)
def test_a_difference_ends_the_start_for_all(zeroth, own, change, message, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    store = HashStore()
    assert "workers 1, 2 did not arrive" in failure(replace(environment(0), **zeroth), store)
    odd = msgspec.structs.replace(SETTINGS, **change)
    refused = failure(replace(environment(1), **own), store, odd, RefusedError)
    assert refused.startswith("worker 1 cannot join: ")
    assert sys.excepthook is not sys.__excepthook__, "the launcher says it, once"
    assert message in refused
    if not zeroth:  # a worker that waits for the refused one ends too, and knows why
        assert failure(environment(2), store) == refused


def test_workers_that_are_all_refused_give_one_reason():
    """Worker 0 is the odd one."""
    store = HashStore()
    failure(environment(0), store, msgspec.structs.replace(SETTINGS, graph="star"))
    reasons = [failure(environment(rank), store, kind=RefusedError) for rank in (2, 1)]
    assert reasons[0].startswith("worker 2 cannot join: graph is 'ring-3' here and 'star' on")
    assert reasons == [reasons[0]] * 2


def test_who_never_arrives_is_named(caplog):
    store = HashStore()
    store.set(f"{KEYS}arrivals/2", "1")
    missing = "workers 1, 3 did not arrive within 60 s; present: 0, 2; check"
    assert missing in failure(environment(0, 4), store)
    assert caplog.messages.count("waiting for workers 1, 3 to arrive, at most 60 s") == 1
    missing = "worker 0 did not arrive within 60 s; present: 1;"
    assert missing in failure(environment(1, 2), HashStore())
    store.set(f"{KEYS}arrivals/1", "1")
    assert "all workers arrived but did not finish" in failure(environment(3, 4), store)


def test_two_workers_of_one_rank_are_refused():
    store = HashStore()
    alone(environment(0, 1), store).meet(HERE, SETTINGS)
    reason = failure(environment(0, 1), store, kind=RefusedError)
    assert re.search("another worker already has RANK 0.*__main__.*; if an earlier process", reason)


def test_a_worker_that_is_started_again_cannot_join_the_second_model_of_its_script():
    store = HashStore()
    meet([environment(0, 1, **MINE)], store, number=1)
    own = environment(0, 1, join=(("127.0.0.1", 1),), **MINE)
    parts = [Rendezvous(own, store, timeout_s=60, number=number) for number in range(2)]
    assert [part.joins for part in parts] == [True, False]
    with pytest.raises(RefusedError, match=r"worker 0 was started again, .* model number 2"):
        parts[1].meet(HERE, SETTINGS)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_with_an_unknown_name_is_named_at_once(rank, monkeypatch, caplog):
    unknown = mock.Mock(side_effect=socket.gaierror(-2, "unknown here"))
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(RendezvousError, match=r"at store:0 within 0\.2 s \(unknown here\); wor"):
        connect(environment(rank), 0.2)
    assert caplog.text.count(f"worker {rank} does not find MASTER_ADDR 'store' (unknown here)") == 1
    assert unknown.call_count <= 3, "it tries again after a pause"


def test_a_store_that_nobody_hosts_is_named_in_time(monkeypatch):
    """Also one that goes while torch is imported."""
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()

    class Slow:
        @property
        def TCPStore(self) -> type:
            listener.close()
            return HashStore

    monkeypatch.setitem(sys.modules, "torch.distributed", Slow())
    said = rf"could not reach the store at {host}:{port} within 0.2 s \(Connection refused\);"
    with pytest.raises(RendezvousError, match=f"^worker 1 {said} worker 0 hosts it: check"):
        Rendezvous.open(replace(environment(1), store_host=host, store_port=port), 0.2)


def test_a_store_that_goes_away_is_one_clear_error(monkeypatch, caplog):
    broken = mock.Mock(side_effect=RuntimeError("Broken pipe\nException raised from ..."))
    gone = mock.Mock(add=broken, set=broken)
    assert re.search(r"lost the store at store:0 .*\(Broken pipe\)", failure(environment(1), gone))
    alone(environment(1), gone).mark_ready()
    assert "went away before this worker began; training goes on" in caplog.text
    monkeypatch.setattr("torch.distributed.TCPStore", broken)
    monkeypatch.setattr(socket, "getaddrinfo", mock.Mock())
    monkeypatch.setattr(socket, "create_connection", mock.Mock())
    for rank, verb in enumerate(("host", "use")):
        with pytest.raises(RendezvousError, match=rf"{verb} the store at store:0: Broken pipe \("):
            connect(environment(rank), LONGEST_S)


def test_one_worker_needs_no_store():
    part = Rendezvous.open(Environment(), timeout_s=1)
    assert part.meet(("127.0.0.1", 9), SETTINGS).addresses == {0: ("127.0.0.1", 9)}
    part.mark_ready()
    with pytest.raises(ValueError, match="the secret has 4 bytes; give at least 16"):
        alone(Environment(), None).meet(HERE, SETTINGS, b"hush")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("worker/0", json.dumps({"host": "\x1b[2Jno" + 9000 * "!"})),
        ("worker/0", json.dumps({"host": "evil.example", "port": 1})),
        ("worker/0", json.dumps({"host": "10.0.0.1", "port": 65536})),
        ("worker/0", json.dumps({"host": "10.0.0.1", "port": 1}).ljust((1 << 16) + 1)),
        ("worker/0", b"\xff\xfe"),
        ("reference", "[1, 2"),
        ("reference", {"run_id": "a\x1b[2J"}),
        ("reference", {"run_id": "a" * 201}),
    ],
)
def test_what_a_stranger_writes_is_one_short_line_without_control_characters(key, value):
    store = HashStore()
    failure(environment(0, 2), store)  # leaves what worker 0 publishes
    if isinstance(value, dict):
        value = json.dumps(json.loads(store.get(f"{KEYS}reference")) | value)
    store.set(f"{KEYS}{key}", value)
    reason = failure(environment(1, 2), store)
    assert "holds something else under this run's" in reason
    assert len(reason) < 1000
    assert reason.isprintable()


def test_a_value_of_the_longest_length_is_read():
    store = HashStore()
    failure(environment(0, 2), store)  # leaves what worker 0 publishes
    store.set(f"{KEYS}worker/0", store.get(f"{KEYS}worker/0").ljust(1 << 16))
    assert alone(environment(1, 2), store).meet(HERE, SETTINGS).addresses[0] == HERE


@pytest.mark.parametrize("is_lost", [False, True])
def test_worker_0_ends_the_store_that_it_hosts_a_while_after_all_have_begun(monkeypatch, is_lost):
    slept, early, lost = list[float](), iter([False, False]), mock.Mock(side_effect=RuntimeError)
    have_begun = (lambda *of: lost()) if is_lost else rendezvous.have_begun
    monkeypatch.setattr(rendezvous, "time", mock.Mock(sleep=slept.append))
    monkeypatch.setattr(rendezvous, "have_begun", lambda *of: next(early, True) and have_begun(*of))
    address = "127.0.0.1", free_port()
    own = replace(environment(0, 1), store_host=address[0], store_port=address[1])
    hosts = Rendezvous(own, connect(own, LONGEST_S), timeout_s=LONGEST_S)
    hosts.meet(HERE, SETTINGS)
    assert listens(address)
    hosts.mark_ready()
    wait_until(lambda: not listens(address), "the store's port is closed")
    assert slept == [*2 * [rendezvous.CHECK_EVERY_S], rendezvous.CLOSE_AFTER_S]
