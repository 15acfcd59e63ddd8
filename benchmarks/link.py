"""How fast is a TCP link, beside the barest poll loop over the same kind of socket?

    python benchmarks/link.py [--megabytes 45] [--rounds 5] [--json PATH]

Two processes, each pinned to a core of its own where there are two, send each other so many
megabytes at once over loopback: full duplex, in chunks of 1 MiB, from and into memory that was
touched before. Rounds of the two loops alternate in the same processes. GB/s is per direction,
over the wall time of the slower process; CPU is what that process spent.
"""

import argparse
import json
import os
import platform
import select
import socket
import statistics
import subprocess
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection

from gossipdp.runtime.frames import ChunkKey, FrameType
from gossipdp.runtime.identity import Identity, Refusal
from gossipdp.runtime.link import Link, LinkHandler
from gossipdp.runtime.tcp import TcpTransport, listen

CHUNK_BYTES = 1 << 20
WINDOW = 4


class Exchanger(LinkHandler):
    """Sends one buffer in chunks and lands the peer's in another."""

    def __init__(self, outgoing: memoryview, incoming: memoryview) -> None:
        self.link: Link | None = None
        self.outgoing = outgoing
        self.incoming = incoming
        self.num_chunks = -(-len(outgoing) // CHUNK_BYTES)
        self.num_queued = self.num_landed = self.num_chunks

    def start(self) -> None:
        """Begin a round."""
        self.num_queued = self.num_landed = 0
        assert self.link is not None
        self.writable(self.link)

    def writable(self, link: Link) -> None:
        """Keep the window full."""
        while self.num_queued < self.num_chunks and link.queued_chunks < WINDOW:
            start = self.num_queued * CHUNK_BYTES
            key = ChunkKey(0, 0, 0, self.num_queued)
            payload = self.outgoing[start : start + CHUNK_BYTES]
            link.send_chunk(FrameType.EXCHANGE_CHUNK, key, payload)
            self.num_queued += 1

    def chunk_buffer(
        self, link: Link, frame_type: FrameType, key: ChunkKey, length: int
    ) -> memoryview:
        """Land every chunk in its place."""
        start = key.index * CHUNK_BYTES
        return self.incoming[start : start + length]

    def chunk(
        self, link: Link, frame_type: FrameType, key: ChunkKey, payload: memoryview | None
    ) -> None:
        """Count."""
        self.num_landed += 1

    def link_up(self, link: Link) -> None:
        """Remember the link."""
        self.link = link

    def link_down(self, link: Link, reason: str) -> None:
        """End the benchmark, unless it is over."""
        raise SystemExit(f"link down: {reason}")

    def control(self, link: Link, data: bytes) -> None:
        """Nothing."""

    def refused(self, peer: int | None, refusal: Refusal) -> None:
        """End the benchmark."""
        raise SystemExit(str(refusal))

    def dial_failed(self, peer: int | None, refused_connection: bool) -> None:
        """End the benchmark."""
        raise SystemExit("dial failed")


def gossip_link(
    rank: int, pipe: Connection, outgoing: memoryview, incoming: memoryview
) -> Callable[[], None]:
    """A round over a :class:`TcpTransport`."""
    handler = Exchanger(outgoing, incoming)
    listener = listen("127.0.0.1", 0)
    identity = Identity(rank, 0, rank, "bench", "", "", "", "", "")
    transport = TcpTransport(handler, identity, b"secret", listener)
    pipe.send(listener.getsockname())
    address = pipe.recv()
    if rank == 0:
        transport.dial(1, *address)
    while handler.link is None:
        transport.poll(1.0)

    def run() -> None:
        handler.start()
        assert handler.link is not None
        while handler.num_landed < handler.num_chunks or handler.link.queued_bytes:
            transport.poll(1.0)

    return run


def bare_sockets(
    rank: int, pipe: Connection, outgoing: memoryview, incoming: memoryview
) -> Callable[[], None]:
    """A round of the barest loop: no frames, no handshake, one link."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname())
        address = pipe.recv()
        if rank == 0:
            connection = socket.create_connection(address)
        else:
            connection, _ = server.accept()
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    poll = select.poll()

    def run() -> None:
        sent = received = 0
        while sent < len(outgoing) or received < len(incoming):
            wanted = (select.POLLIN if received < len(incoming) else 0) | (
                select.POLLOUT if sent < len(outgoing) else 0
            )
            poll.register(connection, wanted)
            for _, mask in poll.poll():
                if mask & select.POLLIN:
                    received += connection.recv_into(incoming[received : received + CHUNK_BYTES])
                if mask & select.POLLOUT:
                    sent += connection.send(outgoing[sent : sent + CHUNK_BYTES])

    return run


KINDS = {"bare_socket": bare_sockets, "tcp_link": gossip_link}


def worker(rank: int, pipe: Connection, num_bytes: int) -> None:
    """Serve rounds until told to stop."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    outgoing = memoryview(bytearray(os.urandom(1 << 20) * (num_bytes // (1 << 20) + 1)))[:num_bytes]
    rounds = {}
    landed = {}
    for name, make in KINDS.items():
        landed[name] = memoryview(bytearray(b"\1" * num_bytes))
        rounds[name] = make(rank, pipe, outgoing, landed[name])
    pipe.send("ready")
    while (name := pipe.recv()) != "stop":
        cpu_s, started_s = time.process_time(), time.perf_counter()
        rounds[name]()
        pipe.send((time.perf_counter() - started_s, time.process_time() - cpu_s))
    assert landed["tcp_link"] == landed["bare_socket"]
    os._exit(0)  # the two ends part in no order


def measure(num_bytes: int, num_rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(wall s, CPU s) of the slower process, per kind and round; one round each to warm up."""
    context = get_context("spawn")
    pipes, processes = [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        pipes.append(ours)
        processes.append(context.Process(target=worker, args=(rank, theirs, num_bytes)))
        processes[-1].start()
    for _ in KINDS:
        addresses = [pipe.recv() for pipe in pipes]
        for pipe, address in zip(pipes, reversed(addresses), strict=True):
            pipe.send(address)
    for pipe in pipes:
        assert pipe.recv() == "ready"
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in KINDS}
    for round_number in range(num_rounds + 1):
        for name in KINDS:
            for pipe in pipes:
                pipe.send(name)
            slower = max(pipe.recv() for pipe in pipes)
            if round_number:
                results[name].append(slower)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("stop")
        process.join()
    return results


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description="Throughput of a TCP link")
    parser.add_argument("--megabytes", type=float, default=45.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    options = parser.parse_args()
    num_bytes = int(options.megabytes * 1e6)
    results = measure(num_bytes, options.rounds)
    print(f"{'':12} {'GB/s':>6} {'min':>6} {'max':>6} {'CPU ms':>7}   {options.megabytes:g} MB")
    record: dict[str, object] = {}
    for name, timings in results.items():
        speeds = [num_bytes / wall_s / 1e9 for wall_s, _ in timings]
        cpu_ms = 1e3 * statistics.median(cpu_s for _, cpu_s in timings)
        median = statistics.median(speeds)
        print(f"{name:12} {median:6.2f} {min(speeds):6.2f} {max(speeds):6.2f} {cpu_ms:7.1f}")
        record |= {f"{name}_gbps": median, f"{name}_gbps_all": speeds, f"{name}_cpu_ms": cpu_ms}
    if options.json:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        record |= {
            "command": f"benchmarks/link.py --megabytes {options.megabytes:g}"
            f" --rounds {options.rounds}",
            "commit": commit,
            "hardware": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
            "python": platform.python_version(),
        }
        with open(options.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
