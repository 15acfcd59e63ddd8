"""The cost of a whole exchange between two workers that train, by size, link and form.

    python benchmarks/exchange.py                  writes benchmarks/results/exchange.{json,md}

That is its wall time, and the processor time of all threads but the training thread.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support.report import Report, Table
from torch import nn

from gossipdp import GossipDataParallel, Network, launch
from gossipdp.links.tls import make_tls_files

LINKS = ("shared memory", "TCP", "TLS")


class Way(NamedTuple):
    """The size of a model, the form of its exchanges, its links, and what training does."""

    num_values: int
    link: str
    wire_format: Any
    training: str

    @property
    def step_s(self) -> float:
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
    while model.stats().exchanges == before[0]:
        train(way.step_s)
    number, wall_s, cpu_s = (now - then for now, then in zip(counts(), before, strict=True))
    model.consolidate()  # it answers until the other has measured too
    return int(number), wall_s / number, cpu_s / number


def table(quick: bool) -> tuple[Table, list[dict[str, Any]]]:
    """Measure whole exchanges; return the table, and a row for each way."""
    sizes = [50_000] if quick else [50_000, 1_000_000, 11_250_000, 100_000_000]
    links, forms = LINKS[2 * int(quick) :], ("full", "lattice8")
    parts = itertools.product(sizes, links, forms, ("waits", "computes"))
    ways = list(itertools.starmap(Way, parts))
    steps = {way: 6 if quick else 4 + int(2.0 / way.step_s) for way in ways}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_tls_files(Path(folder))
        for way in ways:
            environment = {"GOSSIPDP_TLS": folder} if way.link == "TLS" else {}
            task = way, steps[way]
            ends = launch(
                whole_exchange, world_size=2, args=task, environment=environment, timeout_s=600.0
            )
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
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    quick = parser.parse_args().quick
    report = Report("exchange", "Exchange between two processes", quick)
    shown, rows = table(quick)
    report.tables.append(shown)
    report.write({"rows": rows})


if __name__ == "__main__":
    main()
