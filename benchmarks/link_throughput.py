"""How fast chunks cross a link over loopback, in the clear and through TLS, run by run in turn.

    .venv/bin/python benchmarks/link_throughput.py

Two processes send each other 45 chunks of 1 MiB at once, as in an exchange, and each takes the
other's. Prints GB/s in each direction and CPU time of one process, medians over all repetitions.
Needs the openssl program, for the certificates.
"""

from __future__ import annotations

import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gossipdp.runtime.frames import ChunkKey, FrameType
from gossipdp.runtime.identity import Identity
from gossipdp.runtime.link import Link, LinkHandler
from gossipdp.runtime.tcp import TcpTransport, listen
from gossipdp.runtime.tls import Tls, TlsFiles

CHUNK_BYTES = 1 << 20
NUM_CHUNKS = 45
REPETITIONS = 6  # of each pair of processes; the first is not counted
ROUNDS = 5
KEY = "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -subj /CN=bench"


class Exchanger(LinkHandler):
    """Keeps a few chunks queued until all are sent, and counts those that come."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.num_received = 0
        self.num_unsent = 0
        self._payload = memoryview(bytes(CHUNK_BYTES))
        self._landing = memoryview(bytearray(CHUNK_BYTES))

    def link_up(self, link: Link) -> None:
        self.link = link

    def link_down(self, link: Link, reason: str) -> None:
        pass  # the other process was told first that all is over

    def control(self, link: Link, data: bytes) -> None:
        raise RuntimeError("no control message was sent")

    def chunk_buffer(
        self, link: Link, frame_type: FrameType, key: ChunkKey, length: int
    ) -> memoryview:
        return self._landing

    def chunk(
        self, link: Link, frame_type: FrameType, key: ChunkKey, payload: memoryview | None
    ) -> None:
        self.num_received += 1

    def writable(self, link: Link) -> None:
        while self.num_unsent and link.queued_chunks < 4:
            self.num_unsent -= 1
            key = ChunkKey(0, 0, 0, self.num_unsent)
            link.send_chunk(FrameType.EXCHANGE_CHUNK, key, self._payload)

    def refused(self, peer: int | None, refusal: Any) -> None:
        raise RuntimeError(str(refusal))

    def dial_failed(
        self, peer: int | None, address: tuple[str, int], refused_connection: bool
    ) -> None:
        raise RuntimeError("the dial failed")


def work(rank: int, parent: Connection, files: TlsFiles | None) -> None:
    """One end: answers every "go" with its (wall, CPU) seconds."""
    handler, listener = Exchanger(), listen("127.0.0.1", 0)
    identity = Identity(rank, 0, 1 + rank, "bench", "model", "gossip", "pair", "1", "bytes")
    tls = None if files is None else Tls(files)
    transport = TcpTransport(handler, identity, b"secret", listener, tls=tls)
    parent.send(listener.getsockname())
    other = parent.recv()
    if rank == 0:
        transport.dial(1, *other)
    while handler.link is None:
        transport.poll(0.01)
    parent.send("ready")
    total = 0
    while True:
        while not parent.poll():
            transport.poll(0.001)
        if parent.recv() == "end":
            transport.close()
            return
        total += NUM_CHUNKS
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        handler.num_unsent = NUM_CHUNKS
        handler.writable(handler.link)
        while handler.num_received < total or handler.link.queued_chunks:
            transport.poll(1.0)
        parent.send((time.perf_counter() - wall_s, time.process_time() - cpu_s))


def measure(files: TlsFiles | None) -> list[tuple[float, float]]:
    """(the slower end's wall seconds, mean CPU seconds of an end) of each repetition."""
    pipes, processes = [], []
    for rank in range(2):
        ours, theirs = multiprocessing.Pipe()
        processes.append(multiprocessing.Process(target=work, args=(rank, theirs, files)))
        processes[-1].start()
        pipes.append(ours)
    addresses = [pipe.recv() for pipe in pipes]
    for pipe, address in zip(pipes, reversed(addresses), strict=True):
        pipe.send(address)
    assert [pipe.recv() for pipe in pipes] == ["ready", "ready"]
    times = []
    for _ in range(REPETITIONS):
        for pipe in pipes:
            pipe.send("go")
        ends = [pipe.recv() for pipe in pipes]
        times.append((max(wall for wall, _ in ends), sum(cpu for _, cpu in ends) / 2))
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("end")
        process.join()
    return times[1:]


def make_files(directory: Path) -> TlsFiles:
    """A certificate that is its own authority."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        ["openssl", *KEY.split(), "-x509", "-keyout", str(key), "-out", str(cert)],
        check=True,
        capture_output=True,
    )
    return TlsFiles(cert, key, cert)


def main() -> None:
    times: dict[str, list[tuple[float, float]]] = {"plain": [], "tls": []}
    with tempfile.TemporaryDirectory() as directory:
        files = make_files(Path(directory))
        for _ in range(ROUNDS):
            times["plain"] += measure(None)
            times["tls"] += measure(files)
    size = NUM_CHUNKS * CHUNK_BYTES
    for name, found in times.items():
        rates = sorted(size / wall / 1e9 for wall, _ in found)
        cpu_s = statistics.median(cpu for _, cpu in found)
        print(
            f"{name}: {statistics.median(rates):.2f} GB/s in each direction "
            f"({rates[0]:.2f} to {rates[-1]:.2f} over {len(rates)}), CPU {1e3 * cpu_s:.1f} ms a "
            f"process for {size / 2**20:.0f} MiB each way"
        )


if __name__ == "__main__":
    sys.exit(main())
