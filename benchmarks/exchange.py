"""The speed of exchanges on one machine, side by side with gloo, and what whole exchanges cost.

    python benchmarks/exchange.py                  writes benchmarks/results/exchange.{json,md}

Whole exchanges are those of two workers that train: their wall time, and the processor time of all
threads but the training thread. Of the bytes alone: two processes, each pinned to a core of its
own, give each other as many megabytes at once, which wants two quiet cores. GB/s is per direction,
over the wall time of the slower process.
"""

from __future__ import annotations

import abc
import functools
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from support.meeting import Meeting
from support.report import Report, Spread, Table, asked, run_script
from torch import Tensor, nn

from gossipdp import GossipDataParallel, Network, launch
from gossipdp.gossip.codec import tensor_bytes
from gossipdp.links.frames import ChunkKey, FrameType
from gossipdp.links.handshake import Identity, Refusal
from gossipdp.links.link import Link, LinkHandler
from gossipdp.links.sockets import listen
from gossipdp.links.tcp import TcpTransport
from gossipdp.links.tls import Tls, make_tls_files

# The order of the table, and what each is.
CONTENDERS = {
    "shared_memory": "shared memory, writing the values there included",
    "tcp": "a TCP link",
    "tls": "a TCP link through TLS",
    "gloo_at_once": "gloo, isend and irecv",
}
TIMEOUT_S = 60.0
CHUNK_BYTES = 1 << 20
WINDOW = 4
"""Chunks that are queued at once, as in an exchange."""


def values(rank: int, round_number: int, num_values: int) -> Tensor:
    """Return the values of a worker in a round: no two are alike, and both ends know both."""
    return _base(rank, num_values) + round_number


@functools.cache
def _base(rank: int, num_values: int) -> Tensor:
    return torch.randn(num_values, generator=torch.Generator().manual_seed(rank))


class Transfer(abc.ABC):
    """One way of exchanging ``num_values`` float32 each way, from memory to memory."""

    def __init__(self, rank: int, num_values: int) -> None:
        self.rank = rank
        self.num_values = num_values
        self.outgoing = torch.zeros(num_values)
        self.incoming = torch.ones(num_values)

    def prepare(self, round_number: int) -> None:
        """Get this round's values ready, as they are before an exchange."""
        self.outgoing.copy_(values(self.rank, round_number, self.num_values))

    @abc.abstractmethod
    def run(self) -> None:
        """Exchange."""

    def verify(self, round_number: int) -> None:
        """Raise AssertionError unless this round's values have come."""
        expected = values(1 - self.rank, round_number, self.num_values)
        assert torch.equal(self.incoming, expected), "what arrived is not what was sent"


class Gloo(Transfer):
    """torch.distributed's isend and irecv."""

    def run(self) -> None:
        peer = 1 - self.rank
        for work in (dist.isend(self.outgoing, peer), dist.irecv(self.incoming, peer)):
            assert work is not None
            work.wait()


class LinkTransfer(Transfer, LinkHandler):
    """A link of ours, over which chunks go both ways.

    In shared memory chunks are written, which the time includes, and read in place; there is room
    for all, so that what the peer can read after a round is what the round has brought.
    """

    _link: Link | None = None

    def __init__(
        self,
        rank: int,
        num_values: int,
        meeting: Meeting,
        shared_memory: Literal["auto", "off"],
        tls: Path | None = None,
    ) -> None:
        super().__init__(rank, num_values)
        self._sent, self._received = tensor_bytes(self.outgoing), tensor_bytes(self.incoming)
        self._num_chunks = -(-len(self._sent) // CHUNK_BYTES)
        self._num_queued = self._num_landed = self._num_chunks
        self._shared: list[tuple[int, memoryview]] = []
        listener = listen("127.0.0.1", 0)
        self._transport = TcpTransport(
            self,
            Identity(rank, 0, os.getpid(), "bench", "", "", "", "", ""),
            b"a secret of the benchmark",
            listener,
            tls=None if tls is None else Tls(tls),
            shared_memory=shared_memory,
        )
        self._slots: memoryview | None = None
        if shared_memory == "auto":
            self._slots = self._transport.allocate(4 * num_values)
        meeting.say(listener.getsockname()[1])
        meeting.meet()
        if rank == 0:
            self._transport.dial(1, "127.0.0.1", int(meeting.heard(1)))
        deadline_s = time.monotonic() + TIMEOUT_S
        wants_memory = self._transport.memory.segment is not None
        while self._link is None or (wants_memory and not self._link.is_shared):
            self._transport.poll(0.01)
            if time.monotonic() > deadline_s:
                raise RuntimeError("no link, or no memory shared over it")

    def run(self) -> None:
        link = self._link
        assert link is not None
        self._num_queued = self._num_landed = 0
        self._shared.clear()
        self.writable(link)
        while self._num_landed < self._num_chunks or link.queued_chunks:
            self._transport.poll(1.0)
        self._transport.poll(0.0)  # the peer waits for word of its last chunk

    def verify(self, round_number: int) -> None:
        for start, view in self._shared:
            self._received[start : start + len(view)] = view
        super().verify(round_number)

    def link_up(self, link: Link) -> None:
        self._link = link

    def link_down(self, link: Link, reason: str) -> None:
        raise RuntimeError(f"link down: {reason}")

    def control(self, link: Link, data: bytes) -> None:
        raise RuntimeError("a control message came, but nobody sends any")

    def refused(self, peer: int | None, refusal: Refusal) -> None:
        raise RuntimeError(str(refusal))

    def dial_failed(
        self, peer: int | None, address: tuple[str, int], refused_connection: bool
    ) -> None:
        raise RuntimeError("the dial failed")

    def writable(self, link: Link) -> None:
        while self._num_queued < self._num_chunks and link.queued_chunks < WINDOW:
            start = self._num_queued * CHUNK_BYTES
            payload = self._sent[start : start + CHUNK_BYTES]
            if self._slots is not None:
                slot = self._slots[start : start + len(payload)]
                slot[:] = payload
                payload = slot
            key = ChunkKey(0, 0, 0, self._num_queued)
            self._num_queued += 1
            link.send_chunk(FrameType.EXCHANGE_CHUNK, key, payload)

    def chunk_buffer(
        self, link: Link, frame_type: FrameType, key: ChunkKey, length: int
    ) -> memoryview:
        start = key.index * CHUNK_BYTES
        return self._received[start : start + length]

    def chunk(
        self, link: Link, frame_type: FrameType, key: ChunkKey, payload: memoryview | None
    ) -> None:
        assert payload is not None
        self._num_landed += 1
        if self._slots is not None:
            self._shared.append((key.index * CHUNK_BYTES, payload))


def contend(num_values: int, num_rounds: int, folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Take part, as one of two processes; return (wall s, CPU s) per contender and round.

    ``folder`` holds the meeting, and a certificate and its key.
    """
    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    meeting = Meeting(folder / "meeting", rank, poll_s=0.0)  # both begin to run at once
    made: dict[str, Transfer] = {
        "shared_memory": LinkTransfer(rank, num_values, meeting, "auto"),
        "tcp": LinkTransfer(rank, num_values, meeting, "off"),
        "tls": LinkTransfer(rank, num_values, meeting, "off", folder),
        "gloo_at_once": Gloo(rank, num_values),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTENDERS}
    for round_number in range(num_rounds + 1):
        for name, times in found.items():
            contender = made[name]
            contender.prepare(round_number)
            meeting.meet()
            cpu_s, started_s = time.process_time(), time.perf_counter()
            contender.run()
            times.append((time.perf_counter() - started_s, time.process_time() - cpu_s))
            contender.verify(round_number)
    meeting.meet()  # neither leaves before the other has verified
    dist.destroy_process_group()
    return {name: times[1:] for name, times in found.items()}


def measure(megabytes: float, num_rounds: int) -> list[dict[str, Any]]:
    """Return the figures of each contender."""
    num_values = int(megabytes * 1e6) // 4
    with tempfile.TemporaryDirectory() as folder:
        make_tls_files(Path(folder))
        Meeting.create(Path(folder) / "meeting", 2)
        environment = {"GLOO_SOCKET_IFNAME": "lo"}
        task = (num_values, num_rounds, Path(folder))
        ends = launch(contend, world_size=2, args=task, environment=environment, timeout_s=600.0)
    return [row_of(name, num_values, *(end[name] for end in ends)) for name in CONTENDERS]


def row_of(name: str, num_values: int, *ends: list[tuple[float, float]]) -> dict[str, Any]:
    """Return a contender's figures: in each round those of the slower end."""
    slower = [max(both) for both in zip(*ends, strict=True)]
    speeds = [4e-9 * num_values / wall_s for wall_s, _ in slower]
    return {
        "name": name,
        "text": CONTENDERS[name],
        "gbps": speeds,
        "median_gbps": statistics.median(speeds),
        "median_cpu_ms": statistics.median(1e3 * cpu_s for _, cpu_s in slower),
    }


class Way(NamedTuple):
    """The size of a model, the form of its exchanges, its links, and what training does."""

    num_values: int
    link: str
    wire_format: Any
    training: str

    @property
    def step_s(self) -> float:
        """Return how long a step lasts."""
        return max(0.02, 4e-8 * self.num_values)


def whole_exchange(way: Way, num_steps: int) -> tuple[int, float, float]:
    """Take part, as one of two workers; return the number of exchanges, (wall s, CPU s) of one."""
    torch.set_num_threads(1)
    net = nn.Linear(way.num_values // 100, 100, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    network = Network(shared_memory="auto" if way.link == "shared memory" else "off")
    model = GossipDataParallel(
        net, optimizer, comm_rate=4.0, wire_format=way.wire_format, network=network
    )
    sample, filler = torch.randn(1, way.num_values // 100), torch.randn(400, 400)

    def train(seconds: float) -> None:
        end_s = time.perf_counter() + seconds
        while (began_s := time.perf_counter()) < end_s:
            optimizer.zero_grad()
            model(sample).square().mean().backward()
            optimizer.step()
            while (left_s := began_s + way.step_s - time.perf_counter()) > 0:
                time.sleep(left_s) if way.training == "waits" else filler @ filler

    def counts() -> tuple[float, ...]:
        stats, others_s = model.stats(), time.process_time() - time.thread_time()
        return stats.exchanges, stats.exchange_seconds, others_s

    while not model.stats().exchanges:  # until the other is there, and a code knows the distance
        train(way.step_s)
    before = counts()
    train(num_steps * way.step_s)
    number, wall_s, cpu_s = (now - then for now, then in zip(counts(), before, strict=True))
    model.close()
    return int(number), wall_s / max(1, number), cpu_s / max(1, number)


def whole_table(quick: bool) -> tuple[Table, list[dict[str, Any]]]:
    """Measure whole exchanges; return the table, and a row for each way."""
    sizes = [50_000] if quick else [50_000, 1_000_000, 11_250_000, 100_000_000]
    links, forms = ("shared memory", "TCP")[int(quick) :], ("full", "lattice8")
    parts = itertools.product(sizes, links, forms, ("waits", "computes"))
    ways = list(itertools.starmap(Way, parts))
    steps = {way: 6 if quick else 4 + int(2.0 / way.step_s) for way in ways}
    rows = []
    for way in ways:
        ends = launch(whole_exchange, world_size=2, args=(way, steps[way]), timeout_s=600.0)
        number, wall_s, cpu_s = ends[0]
        rows.append(
            way._asdict() | {"number": number, "wall_ms": 1e3 * wall_s, "cpu_ms": 1e3 * cpu_s}
        )
    lines = [
        (
            f"{size:,}",
            link,
            form,
            *(
                f"{row[key]:.1f}"
                for row in rows
                if (row["num_values"], row["link"], row["wire_format"]) == (size, link, form)
                for key in ("wall_ms", "cpu_ms")
            ),
        )
        for size, link, form in itertools.product(sizes, links, forms)
    ]
    head = ("values", "link", "form", "wall ms", "CPU ms", "busy: wall ms", "busy: CPU ms")
    fewest = min(row["number"] for row in rows)
    note = f"One exchange: the mean of {fewest} at least, of one run each."
    return Table("Whole exchanges of two workers", head, lines, note), rows


def main() -> None:
    quick, rounds = asked(__doc__, rounds=5)
    megabytes = 2.0 if quick else 45.0
    report = Report("exchange", "Exchange between two processes", quick)
    found = measure(megabytes, rounds)
    rows = [
        (row["text"], Spread.of(row["gbps"]).text(), f"{row['median_cpu_ms']:.0f}") for row in found
    ]
    report.tables.append(
        Table(
            f"{megabytes:g} MB of float32 each way",
            ("", "GB/s each way", "CPU ms"),
            rows,
            f"Medians of {rounds} interleaved rounds (least to greatest), one more "
            "uncounted; GB/s over the wall time of the slower process, CPU time of that process. "
            "What every round brought was verified.",
        )
    )
    table, whole = whole_table(quick)
    report.tables.append(table)
    report.write({"rows": found, "megabytes": megabytes, "whole": whole})


if __name__ == "__main__":
    run_script(main)
