"""Launch plans, the store that they host, and the reports of workers."""

import dataclasses
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from calling_back import CallingLock
from torch.distributed import TCPStore
from waiting import LONGEST_S, wait_until

from gossipdp.errors import RendezvousError
from gossipdp.launcher import launch_plan as plans
from gossipdp.launcher import store as stores
from gossipdp.launcher.environment import Environment
from gossipdp.launcher.launch_plan import LaunchPlan
from gossipdp.launcher.reports import (
    MAX_ADDRESSES,
    REPORT_VARIABLE,
    Report,
    ReportChannel,
    report_variables,
    send_report,
)
from gossipdp.launcher.store import HostedStore, connect, ready_key

SECRET = "a secret of this test"


@contextmanager
def opened(plan: LaunchPlan) -> Iterator[Any]:
    """Open the plan's store and yield a connection to it."""
    plan.open()
    try:
        yield connect(Environment.read(plan.worker_variables(0)), 30)
    finally:
        plan.close()


# Of the second of two workers that torchrun started on one host.
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "3",
}


def test_a_run_of_its_own_has_an_id_and_a_secret() -> None:
    plan = LaunchPlan.on_one_host(3)
    workers = [Environment.read(plan.worker_variables(rank)) for rank in range(3)]
    plan.close()
    assert [worker.rank for worker in workers] == [0, 1, 2]
    assert {(worker.world_size, worker.local_world_size) for worker in workers} == {(3, 3)}
    assert {worker.run_id for worker in workers} == {plan.run_id}
    assert {worker.secret for worker in workers} == {str(plan.secret).encode()}
    assert {worker.key_prefix for worker in workers} == {plan.key_prefix}
    assert not plan.others_elsewhere
    assert str(plan.secret) not in repr(plan)


def test_the_second_of_three_hosts() -> None:
    plan = LaunchPlan.on_several_hosts(2, 3, 1, ("10.0.0.1", 5), SECRET)
    worker = Environment.read(plan.worker_variables(1))
    assert (worker.rank, worker.world_size, worker.local_rank) == (3, 6, 1)
    assert (worker.store_host, worker.store_port) == ("10.0.0.1", 5)
    assert (worker.secret, worker.unique_run_id) == (SECRET.encode(), False)
    assert worker.key_prefix == plan.key_prefix
    assert plan.others_elsewhere


def test_the_worker_is_told_what_the_launcher_said() -> None:
    plan = LaunchPlan.launched(TORCHRUN, SECRET)
    worker = Environment.read(plan.worker_variables(0))
    assert plan.first_rank == 1
    assert worker == dataclasses.replace(Environment.read(TORCHRUN), secret=SECRET.encode())
    assert worker.key_prefix == plan.key_prefix
    step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    plan = LaunchPlan.launched(step, None)
    assert Environment.read(plan.worker_variables(0)) == Environment.read(step)
    assert Environment.read(plan.worker_variables(0)).hosts_store


def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            RendezvousError, match=rf"^port {port} on 127.0.0.1 is in use; choose another"
        ):
            LaunchPlan.on_one_host(1, port=port)


def own_address() -> str:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 9))
        except OSError:
            pytest.skip("no network but loopback")
        return str(probe.getsockname()[0])


def begin(store: Any, plan: LaunchPlan) -> None:
    for rank in range(plan.world_size):
        store.set(ready_key(plan.key_prefix, rank), "1")


def test_a_store_that_others_reach_closes_once_all_have_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []
    have_all_begun = HostedStore.have_all_begun

    def look(store: HostedStore) -> bool:
        looks.append(len(looks))
        return have_all_begun(store)

    monkeypatch.setattr(HostedStore, "have_all_begun", look)
    monkeypatch.setattr(stores, "CHECK_EVERY_S", 0.01)
    monkeypatch.setattr(stores, "CLOSE_AFTER_S", 0.1)
    plan = LaunchPlan.on_one_host(2, own_address())
    assert plan.store is not None
    with opened(plan) as store:
        store.set(ready_key(plan.key_prefix, 0), "1")
        wanted = len(looks) + 2
        wait_until(lambda: len(looks) >= wanted, "it has looked whether all have begun")
        assert plans.listens(plan.store)
        begin(store, plan)
        wait_until(lambda: not plans.listens(plan.store), "its port is closed")
        assert plan.hosted is not None
        assert plan.hosted.have_all_begun()


def test_a_store_on_loopback_stays_for_the_users_process_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stores, "CLOSE_AFTER_S", 0.0)
    plan = LaunchPlan.on_one_host(2)
    with opened(plan) as store:
        begin(store, plan)
        time.sleep(2 * stores.CHECK_EVERY_S)
        assert store.check([ready_key(plan.key_prefix, 0)])


def test_a_store_that_is_closed_while_torch_is_imported_is_not_opened() -> None:
    """The owner closes it just before the thread that has imported torch takes the lock."""
    store = stores.HostedStore()
    address = store.host, store.port
    store._lock = lock = CallingLock(before=store.close)
    store._open()
    assert lock.has_called
    assert not plans.listens(address)
    assert not store.have_all_begun()


def test_a_store_that_goes_while_torch_is_imported_is_not_tried_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()

    class Slow:
        @property
        def TCPStore(self) -> type:
            listener.close()
            return TCPStore

    monkeypatch.setitem(sys.modules, "torch.distributed", Slow())
    with pytest.raises(ConnectionRefusedError):
        stores.reach(address)


@pytest.fixture
def supervised() -> Iterator[list[LaunchPlan]]:
    """Two supervisors under torchrun, whose own store they share."""
    store = HostedStore()
    store.open_in_background("none/", 1)
    told = TORCHRUN | {"MASTER_PORT": str(store.port)}
    yield [LaunchPlan.launched(told | {"RANK": str(rank)}, None) for rank in range(2)]
    store.close()


def test_supervisors_under_torchrun_leave_together(
    supervised: list[LaunchPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, waits = [], threading.Event()

    def sleep(seconds: float) -> None:
        waits.set()
        time.sleep(seconds)

    monkeypatch.setattr(plans, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))

    def leave(rank: int, *, wait: bool) -> None:
        assert supervised[rank].leave({}, wait=wait) == []
        ended.append(rank)

    waiting = threading.Thread(target=leave, args=(0,), kwargs={"wait": True})
    waiting.start()
    assert waits.wait(LONGEST_S)
    assert ended == []
    leave(1, wait=False)
    waiting.join(LONGEST_S)
    assert ended == [1, 0]


def test_a_lost_supervisor_is_not_waited_for_for_ever(
    supervised: list[LaunchPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "LOST_AFTER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as worker:
        address = worker.getsockname()[:2]
        threading.Timer(1.5, worker.close).start()
        assert supervised[0].leave({1: address}, wait=True) == [1]
        assert worker.fileno() == -1  # as long as it listened it lived


def test_without_torchruns_store_nobody_waits() -> None:
    told = TORCHRUN | {"MASTER_PORT": str(nobody()[1])}
    assert LaunchPlan.launched(told, None).leave({}, wait=True) == []


def nobody() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[:2]


@pytest.fixture
def channel() -> Iterator[ReportChannel]:
    channel = ReportChannel()
    yield channel
    channel.close()


def test_reports_arrive_whole_and_in_order(channel: ReportChannel) -> None:
    variables = report_variables(channel.sender)
    addresses = {0: ("127.0.0.1", 4000), 7: ("::1", 4001)}
    first = Report(addresses=addresses, run_id="r", secret="s")
    assert send_report(first, variables)
    assert send_report(Report(begins=True), variables)
    assert channel.take() == [first, Report(begins=True)]
    assert channel.take() == []


def test_more_addresses_than_anybody_needs_are_cut(channel: ReportChannel) -> None:
    many = dict.fromkeys(range(5000), ("2001:db8:1111:2222:3333:4444:5555:6666", 65535))
    assert send_report(Report(addresses=many), report_variables(channel.sender))
    (report,) = channel.take()
    assert report.addresses is not None
    assert list(report.addresses) == list(range(MAX_ADDRESSES))


def test_garbage_is_skipped(channel: ReportChannel) -> None:
    channel.sender.send(b"{")
    channel.sender.send(b'{"rank": "x"}')
    channel.sender.send(b'{"rank": 3}')
    assert channel.take() == [Report(rank=3)]


def test_a_full_queue_and_an_end_without_a_reader_do_no_harm(channel: ReportChannel) -> None:
    variables = report_variables(channel.sender)
    taken = 0
    while send_report(Report(begins=True), variables):
        taken += 1
        assert taken < 100_000
    channel.receiver.close()
    assert not send_report(Report(begins=True), variables)


def test_another_thing_under_the_same_number_is_left_alone() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        inode = os.fstat(ours.fileno()).st_ino
        assert not send_report(Report(rank=1), {REPORT_VARIABLE: f"{ours.fileno()}:{inode + 1}"})
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(100)
    reader, writer = os.pipe()
    try:
        inode = os.fstat(writer).st_ino
        assert not send_report(Report(rank=1), {REPORT_VARIABLE: f"{writer}:{inode}"})
    finally:
        os.close(reader)
        os.close(writer)


def test_without_a_launcher_nothing_is_sent() -> None:
    assert not send_report(Report(begins=True), {})
    assert not send_report(Report(begins=True), {REPORT_VARIABLE: "nonsense"})
    assert not send_report(Report(begins=True), {REPORT_VARIABLE: "999999:1"})
