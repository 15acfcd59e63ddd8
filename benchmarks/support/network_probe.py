"""The rate and the delay of a network between namespaces, measured by plain sockets."""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from support.hosts import Hosts, enter

PORT = 29_399
START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Measured:
    """mbits_per_s: of payload, one TCP connection after its slow start. round_trip_ms: median."""

    mbits_per_s: float
    round_trip_ms: float


def measure(hosts: Hosts, *, warm_up_s: float = 0.7, measured_s: float = 1.0) -> Measured:
    """Between the first two hosts, one way; what arrives in the first ``warm_up_s`` is not counted.

    Raises:
        RuntimeError: the processes at both ends did not start, or nothing passed.
    """
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    address, seconds = hosts.addresses[0], warm_up_s + measured_s
    server = context.Process(target=_serve, args=(hosts.names[0], address, warm_up_s, theirs))
    client = context.Process(target=_send, args=(hosts.names[1], address, seconds, theirs))
    server.start()
    try:
        if not ours.poll(START_TIMEOUT_S):
            raise RuntimeError("the probe of the network did not start; its error is above")
        ours.recv()
        client.start()
        values = {}
        for _ in range(2):
            if not ours.poll(START_TIMEOUT_S):
                raise RuntimeError("the probe of the network gave no result; its error is above")
            values.update(ours.recv())
        client.join(START_TIMEOUT_S)
        server.join(START_TIMEOUT_S)
    finally:
        for process in (server, client):
            if process.is_alive():
                process.kill()
    return Measured(**values)


def _serve(namespace: str, address: str, warm_up_s: float, results: Connection) -> None:
    enter(namespace)
    with socket.create_server((address, PORT)) as listener:
        listener.settimeout(START_TIMEOUT_S)
        results.send("listens")
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while (byte := connection.recv(1)) == b"p":
                connection.sendall(byte)
            counted, room = 0, bytearray(1 << 20)
            from_s = last_s = time.monotonic() + warm_up_s
            while num_bytes := connection.recv_into(room):
                last_s = time.monotonic()
                if last_s >= from_s:
                    counted += num_bytes
    results.send({"mbits_per_s": counted * 8e-6 / (last_s - from_s)})


def _send(namespace: str, address: str, seconds: float, results: Connection) -> None:
    enter(namespace)
    with socket.create_connection((address, PORT), timeout=START_TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(11):
            sent_s = time.monotonic()
            connection.sendall(b"p")
            connection.recv(1)
            trips.append(time.monotonic() - sent_s)
        results.send({"round_trip_ms": 1e3 * statistics.median(trips)})
        connection.sendall(b"b")
        data, until_s = bytes(1 << 18), time.monotonic() + seconds
        while time.monotonic() < until_s:
            connection.sendall(data)
