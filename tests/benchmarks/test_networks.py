"""The emulated links that the benchmarks run on."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.emulator import QUEUE_S, Line, Switch
from support.hosts import EmulatedHosts, Hosts, enter, missing

PORT = 29_399
RATE, DELAY_S = 1_000_000.0, 0.020
ADDRESSES = [bytes([10, 0, 0, number]) for number in range(3)]


def packet(source: int, target: int, num_bytes: int) -> bytes:
    header = bytes([0x45, *[0] * 11]) + ADDRESSES[source] + ADDRESSES[target]
    return header.ljust(num_bytes, b"\0")


class Arrivals:
    """A switch between three hosts, and what has arrived where and when."""

    def __init__(self) -> None:
        hosts = {address: number for number, address in enumerate(ADDRESSES)}
        self.now_s = 0.0
        self.arrived: list[tuple[float, int, int]] = []
        self.switch = Switch(hosts, RATE, DELAY_S, self.arrive)

    def arrive(self, host: int, data: bytes) -> None:
        self.arrived.append((self.now_s, host, len(data)))

    def run(self) -> None:
        while self.switch.next_s() < float("inf"):
            self.now_s = self.switch.next_s()
            self.switch.advance(self.now_s)


def test_hosts_do_not_share_cables_but_one_host_does():
    net = Arrivals()
    net.switch.take(0, packet(0, 1, 1000), 0.0)
    net.switch.take(1, packet(1, 0, 1000), 0.0)  # the other way: at the same time
    net.switch.take(2, packet(2, 0, 1000), 0.0)  # to the same host: after it
    net.run()
    at_s = [DELAY_S + 0.002, DELAY_S + 0.002, DELAY_S + 0.003]
    assert [arrival[0] for arrival in net.arrived] == pytest.approx(at_s)
    assert sorted(arrival[1] for arrival in net.arrived) == [0, 0, 1]


def test_the_switch_drops_what_its_queue_cannot_hold():
    net = Arrivals()
    size, count = 9000, 80
    for source in (0, 1):
        for _ in range(count):
            net.switch.take(source, packet(source, 2, size), 0.0)
    net.run()
    # Twice the rate comes in, so half of it gathers, less what the queue holds.
    assert net.switch.num_dropped == pytest.approx(count - QUEUE_S * RATE / size, abs=2)
    assert len(net.arrived) + net.switch.num_dropped == 2 * count


@given(st.lists(st.tuples(st.floats(0, 0.01), st.integers(20, 9000)), min_size=2, max_size=50))
def test_a_line_is_never_faster_than_its_rate_and_never_idle_with_work(packets):
    line, now_s, left_s, work_s = Line(RATE), 0.0, 0.0, 0.0
    for gap_s, num_bytes in packets:
        now_s += gap_s
        work_s = max(work_s, now_s) + num_bytes / RATE
        sent_s = line.send(now_s, num_bytes)
        assert sent_s is not None
        assert sent_s >= left_s + num_bytes / RATE - 1e-12
        assert sent_s == pytest.approx(work_s)
        left_s = sent_s


def probe(hosts: Hosts, *sizes: int) -> list[float]:
    """Return how long so many bytes take from the second host to the first, with an answer.

    A thread is at each end, as a thread can be in a namespace of its own.
    """
    listening = threading.Event()

    def serve() -> None:
        enter(hosts.names[0])
        with socket.create_server((hosts.addresses[0], PORT)) as listener:
            listener.settimeout(60)
            listening.set()
            connection, _ = listener.accept()
        with connection:
            for num_bytes in sizes:
                connection.recv(num_bytes, socket.MSG_WAITALL)
                connection.sendall(b"a")

    def send() -> list[float]:
        enter(hosts.names[1])
        assert listening.wait(60)
        seconds = []
        with socket.create_connection((hosts.addresses[0], PORT), timeout=60) as connection:
            for num_bytes in sizes:
                sent_s = time.monotonic()
                connection.sendall(bytes(num_bytes))
                assert connection.recv(1) == b"a"
                seconds.append(time.monotonic() - sent_s)
        return seconds

    with ThreadPoolExecutor(2) as threads:
        serving, sending = threads.submit(serve), threads.submit(send)
        serving.result()
        return sending.result()


@pytest.mark.processes
def test_an_emulated_network_is_slower_than_the_machine_s_own():
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with EmulatedHosts(2, 40, 10) as hosts:
        round_trip_s, transfer_s = probe(hosts, 1, 1_500_000)
    # Without the emulator it is many times as fast.
    assert 1.5 * 8 / transfer_s < 2.0 * 40
    assert round_trip_s >= 0.020
