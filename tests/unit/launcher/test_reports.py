import os
import socket
from collections.abc import Iterator

import pytest

from gossipdp.launcher.reports import (
    MAX_ADDRESSES,
    VARIABLE,
    Report,
    ReportChannel,
    report_variables,
    send_report,
)


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
        assert not send_report(Report(rank=1), {VARIABLE: f"{ours.fileno()}:{inode + 1}"})
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(100)
    reader, writer = os.pipe()
    try:
        inode = os.fstat(writer).st_ino
        assert not send_report(Report(rank=1), {VARIABLE: f"{writer}:{inode}"})
    finally:
        os.close(reader)
        os.close(writer)


def test_without_a_launcher_nothing_is_sent() -> None:
    assert not send_report(Report(begins=True), {})
    assert not send_report(Report(begins=True), {VARIABLE: "nonsense"})
    assert not send_report(Report(begins=True), {VARIABLE: "999999:1"})
