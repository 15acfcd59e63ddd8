import dataclasses
import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from calling_back import CallingLock
from clocks import Clock
from links import identity, listening
from run_processes import TORCHRUN, free_port, listens
from torch.distributed import TCPStore
from waiting import LONGEST_S, wait_until

from gossipdp.errors import RefusedError, RendezvousError
from gossipdp.launcher import launch_plan as plans
from gossipdp.launcher import reports
from gossipdp.launcher import store as stores
from gossipdp.launcher.environment import Environment
from gossipdp.launcher.launch_plan import JoinInfo, LaunchPlan, ask_join_infos
from gossipdp.launcher.reports import Report, ReportChannel, report_variables, send_report
from gossipdp.launcher.store import HostedStore, connect, ready_key
from gossipdp.links.handshake import MAGIC, VERSION, Handshake
from gossipdp.links.tls import Tls

SECRET = "a secret of this test"


def test_a_run_of_its_own_has_an_id_and_a_secret():
    plan = LaunchPlan.on_hosts(3)
    workers = [Environment.read(plan.worker_variables(rank)) for rank in range(3)]
    plan.close()
    assert [worker.rank for worker in workers] == [0, 1, 2]
    for worker in workers:
        assert (worker.world_size, worker.local_world_size) == (3, 3)
        assert (worker.run_id, worker.secret) == (plan.run_id, str(plan.secret).encode())
    assert not plan.others_elsewhere
    assert (len(plan.run_id), len(plan.secret)) == (16, 32), "digits of four bits"
    assert plan.worker_variables(0)["TORCHELASTIC_RUN_ID"] == plan.run_id, "for scripts"
    plan.join_infos[0].take(Report(secret=plan.secret))  # as of workers that have one of their own
    assert plan.secret not in repr(plan)


def test_when_all_meet_again_no_address_of_before_is_left():
    with closing(LaunchPlan.on_hosts(2, num_shards=2)) as plan:
        for info in plan.join_infos:
            info.take(Report(addresses={5: ("127.0.0.1", 9)}))
        assert plan.others_elsewhere
        before = plan.hosted
        plan.meet_again()
        assert before._listener is None, "its port is free"
        assert [(info.addresses, info.live) for info in plan.join_infos] == [({}, frozenset())] * 2


def test_the_second_of_three_hosts():
    plan = LaunchPlan.on_hosts(2, ("10.0.0.1", 5), SECRET, num_hosts=3, host_rank=1)
    assert plan.others_elsewhere
    assert plan.worker_variables(1)["GROUP_RANK"] == "1"
    assert Environment.read(plan.worker_variables(1)) == Environment(
        3, 6, 1, 2, store_host="10.0.0.1", store_port=5, agent_store=True, secret=SECRET.encode()
    )


def test_the_worker_of_another_launcher_keeps_its_place():
    plan = LaunchPlan.launched(TORCHRUN, SECRET)
    worker = Environment.read(plan.worker_variables(0))
    assert plan.first_rank == 3
    assert worker == dataclasses.replace(Environment.read(TORCHRUN), secret=SECRET.encode())
    step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    plan = LaunchPlan.launched(step, None)
    assert Environment.read(plan.worker_variables(0)) == Environment.read(step)
    assert Environment.read(plan.worker_variables(0)).hosts_store


def test_a_store_that_others_reach_closes_once_all_have_begun(monkeypatch):
    """It looks now and then whether they have, and leaves them some time after that."""
    waits: list[float] = []
    with closing(HostedStore()) as hosted:
        address = hosted.address
        hosted._expected = "run/", 2
        hosted._open()
        store = connect(client_of(address), 30)
        store.set(ready_key("run/", 0), "1")

        def wait(seconds: float) -> None:
            assert listens(address)
            waits.append(seconds)
            if len(waits) == 2:
                store.set(ready_key("run/", 1), "1")

        monkeypatch.setattr(hosted._closing, "wait", wait)
        monkeypatch.setattr(hosted, "_open", lambda: None)
        hosted.address = "10.0.0.1", 9  # as of a network
        hosted._run()
        assert waits == [stores.CHECK_EVERY_S, stores.CHECK_EVERY_S, stores.CLOSE_AFTER_S]
        wait_until(lambda: not listens(address), "its port is closed")
        assert hosted.have_all_begun()


def test_a_store_on_loopback_stays_for_the_users_process_groups(monkeypatch):
    monkeypatch.setattr(stores, "CLOSE_AFTER_S", 0.0)
    with closing(LaunchPlan.on_hosts(2)) as plan:
        plan.open()
        store = connect(Environment.read(plan.worker_variables(0)), 30)
        for rank in range(2):
            store.set(ready_key(plan.key_prefix, rank), "1")
        plan.hosted._thread.join(LONGEST_S)  # which would close it
        assert store.check([ready_key(plan.key_prefix, 0)])


@pytest.mark.parametrize("when", ["before torch opens it", "meanwhile", "after it"])
def test_a_store_that_is_closed_before_all_is_open_stays_closed(when, monkeypatch):
    """Also just before the thread takes the lock. None holds it while torch opens the store."""
    store = HostedStore()
    lock = CallingLock(before=store.close)

    def in_torch(*address: Any, **options: Any) -> TCPStore:
        assert when != "before torch opens it", "it is not wanted any more"
        if when == "meanwhile":
            store.close()
        store._lock = lock
        return TCPStore(*address, **options)

    monkeypatch.setattr("torch.distributed.TCPStore", in_torch)
    if when == "before torch opens it":
        store._lock = lock
    store._open()
    assert lock.has_called
    assert not listens(store.address)
    for call in (store.have_all_begun, store.close):
        store._lock = lock = CallingLock(before=lambda: None)
        assert not call()
        assert lock.has_called


def client_of(address: tuple[str, int]) -> Environment:
    host, port = address
    return Environment(1, 2, store_host=host, store_port=port, agent_store=True)


def test_torch_s_clients_have_the_time_that_a_silent_name_server_takes(monkeypatch):
    """They ask for a name before they connect; glibc asks up to three servers twice, in 28 s."""
    given, waits_s, dial = list[float](), list[float](), socket.create_connection

    def recorded(*address: Any, timeout: timedelta, **options: Any) -> TCPStore:
        given.append(timeout.total_seconds())
        return TCPStore(*address, timeout=timeout, **options)

    monkeypatch.setattr("torch.distributed.TCPStore", recorded)
    monkeypatch.setattr(socket, "create_connection", lambda *to: waits_s.append(to[1]) or dial(*to))
    with closing(HostedStore()) as store:
        store._open()
        for seconds in (1.0, 50.0):
            waits_s.append(connect(client_of(store.address), seconds).timeout.total_seconds())
    assert [round(seconds, -1) for seconds in given] == [30, 30, 50]
    # To dial, and then to ask, a second at least.
    assert waits_s == pytest.approx([1.0, 1.0, stores.CONNECT_S, 50.0], rel=0.15, abs=0.9)


@pytest.fixture
def supervised() -> Iterator[list[LaunchPlan]]:
    """Two supervisors under torchrun, whose own store they share."""
    with closing(HostedStore()) as store:
        store.open_in_background("none/", 1)
        told = TORCHRUN | {"MASTER_PORT": str(store.address[1]), "WORLD_SIZE": "2"}
        yield [LaunchPlan.launched(told | {"RANK": str(rank)}, None) for rank in range(2)]


def test_supervisors_under_torchrun_leave_together(supervised, monkeypatch):
    clock = Clock(longest_s=20.0)

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if clock.now_s == 2.0:
            assert supervised[1].leave(wait=False) == []

    monkeypatch.setattr(plans, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
    assert supervised[0].leave(wait=True) == []
    assert clock.now_s == 2.0


def test_a_lost_supervisor_is_not_waited_for_for_ever(supervised, monkeypatch):
    """But for whoever's host answers, though its worker listens at another port by now."""
    clock = Clock(longest_s=2000.0)
    passing = SimpleNamespace(monotonic=clock, sleep=lambda _: clock.sleep(100.0))
    supervised[0].join_infos[0].addresses[1] = address = ("127.0.0.1", free_port())
    assert plans.answers(address)
    monkeypatch.setattr(plans, "time", passing)
    monkeypatch.setattr(plans, "answers", lambda each: each == address and clock.now_s < 500.0)
    assert supervised[0].leave(wait=True) == [1]
    # At 400 s it answered for the last time.
    assert clock.now_s - 400.0 == plans.LOST_AFTER_S + 100.0


def test_without_torchruns_store_there_is_no_wait(monkeypatch):
    monkeypatch.setattr(plans, "CONNECT_S", 0.1)
    own = TORCHRUN | {"MASTER_PORT": str(free_port())}
    assert LaunchPlan.launched(own, None).leave(wait=True) == []
    monkeypatch.setattr(plans, "connect", None)  # without torchrun nothing is to be told
    assert LaunchPlan(2).leave(wait=True) == []


def as_a_worker() -> Handshake:
    return Handshake(identity(2, run_id="the run"), SECRET.encode(), dialler=False)


def refuse(connection: socket.socket) -> None:
    """Answer as a worker that takes the greeting for one of TLS."""
    handshake = as_a_worker()
    handshake.receive(b"\x16\x03"[: handshake.num_wanted].ljust(handshake.num_wanted, b"\0"))
    connection.sendall(handshake.take_output())
    connection.recv(1000)


def drip(connection: socket.socket) -> None:
    connection.sendall(MAGIC + bytes(VERSION) + (4000).to_bytes(2, "little"))
    while True:  # until it is closed at the other end
        connection.sendall(b"\0")
        time.sleep(0.02)


def test_a_worker_says_to_which_run_it_belongs(monkeypatch):
    """Each address has the whole time to answer the dial."""

    def greet(connection: socket.socket) -> None:
        handshake = as_a_worker()
        while handshake.num_wanted:
            handshake.receive(connection.recv(handshake.num_wanted))
        connection.sendall(handshake.take_output())

    given, dial = list[float](), socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda *to: given.append(to[1]) or dial(*to))
    with listening(greet) as address:
        both = ("127.0.0.1", free_port()), address
        assert ask_join_infos(both, 1) == [JoinInfo("the run", join=both)]
    assert [round(seconds) for seconds in given] == [5, 5]


@pytest.mark.parametrize(
    ("answer", "timeout_s", "message"),
    [
        (lambda peer: peer.sendall(b"HTTP/1.1 400 Bad\r\n"), LONGEST_S, "connection starts with"),
        (lambda peer: peer.recv(10), LONGEST_S, "closed the connection|reset by peer"),
        (drip, 0.2, "in time|timed out"),
        (refuse, LONGEST_S, "TLS is off"),
    ],
)
def test_who_does_not_say_its_run_is_not_waited_for(answer, timeout_s, message):
    error = RefusedError if answer is refuse else RendezvousError
    with listening(answer) as address, pytest.raises(error, match=message):
        ask_join_infos([address], 1, timeout_s=timeout_s)


def test_no_connection_is_left_where_tls_comes_to_nothing(authority, open_descriptors):
    tls = Tls(authority.issue())
    before = open_descriptors()
    with (
        listening(lambda connection: connection.sendall(b"no TLS")) as address,
        pytest.raises(RendezvousError) as raised,
    ):
        ask_join_infos([address], 1, tls)
    assert open_descriptors() == before, raised  # which would keep a socket alive


def test_the_networks_to_join_are_known_by_their_run_ids(monkeypatch):
    first, second, third, silent = (("10.0.0.1", port) for port in (1, 2, 3, 4))
    run_ids = {first: "r-shard-1-of-2", second: "r-shard-0-of-2", third: "r-shard-1-of-2"}

    def ask(address: tuple[str, int], *_: object) -> str:
        if address not in run_ids:
            raise ConnectionRefusedError
        return run_ids[address]

    monkeypatch.setattr(plans, "_ask", ask)
    assert ask_join_infos([first, silent, second, third], 2) == [
        JoinInfo("r-shard-0-of-2", join=(second,)),
        JoinInfo("r-shard-1-of-2", join=(first, third)),
    ]
    with pytest.raises(RendezvousError, match=r"no worker to join answers \(10.0.0.1:4: closed"):
        ask_join_infos([first, silent], 2)


@pytest.mark.parametrize(
    ("run_ids", "num_shards", "message"),
    [
        (["r-shard-0-of-2"], 2, "of those given none is of shard 1: the run's first"),
        (["r-shard-0-of-2", "other-shard-1-of-2"], 2, "of those given they are of two runs"),
        (["r-shard-0-of-4"], 2, "is 2, and the run's replicas have 4 processes: give 4, and to"),
        (["r-shard-0-of-2"], 1, "is 1, and the run's replicas have 2 processes: give 2, and to"),
        (["r"], 2, "is 2, and the run's replicas have 1 processes: give 1, and to"),
    ],
)
def test_a_replica_needs_a_process_of_each_shard_to_join(run_ids, num_shards, message, monkeypatch):
    monkeypatch.setattr(plans, "_ask", lambda address, *_: run_ids[address[1]])
    with pytest.raises(ValueError, match=message):
        ask_join_infos([("10.0.0.1", each) for each in range(len(run_ids))], num_shards)


@pytest.fixture
def channel() -> Iterator[ReportChannel]:
    with closing(ReportChannel()) as channel:
        yield channel


def test_addresses_are_bounded_and_garbage_is_skipped(channel):
    many = dict.fromkeys(range(5000), ("2001:db8:1111:2222:3333:4444:5555:6666", 65535))
    assert send_report(Report(addresses=many), report_variables(channel.sender))
    for message in (b"{", b'{"rank": "x"}', b'{"rank": 3}'):
        channel.sender.send(message)
    bounded, last = channel.take()
    assert list(bounded.addresses) == list(range(256))
    assert last == Report(rank=3)


def test_who_joins_is_told_the_newest_addresses_of_many():
    info = JoinInfo()
    info.take(Report(addresses={rank: ("127.0.0.1", 1000 + rank) for rank in range(40)}))
    told = info.join_variables(39, 0)
    ports = [int(address.rpartition(":")[2]) for address in told["GOSSIPDP_JOIN"].split(",")]
    assert ports == list(range(1038, 1006, -1))
    joiner = Environment.read(told | {"RANK": "39", "GOSSIPDP_RUN_ID": "r"})
    assert [port for _, port in joiner.addresses_to_join()] == list(range(1038, 1007, -1))


def test_a_full_queue_and_an_end_without_a_reader_do_no_harm(channel):
    variables = report_variables(channel.sender)
    taken = 0
    while send_report(Report(begins=True), variables):
        taken += 1
        assert taken < 100_000
    channel.receiver.close()
    assert not send_report(Report(begins=True), variables)


def test_another_thing_under_the_same_number_is_left_alone():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    reader, writer = os.pipe()
    with ours, theirs, open(reader, "rb"), open(writer, "wb"):
        another = f"{ours.fileno()}:{os.fstat(ours.fileno()).st_ino + 1}"
        no_socket = f"{writer}:{os.fstat(writer).st_ino}"
        for said in (another, no_socket, "999999:1", "nonsense", "", "9" * 11, "²"):
            assert not send_report(Report(rank=1), {reports.REPORT_VARIABLE: said})
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(100)
    assert not send_report(Report(rank=1), {})
