"""``make large``: three workers of 500 million values, a time-out of 2 s, and the end is right.

    .venv/bin/python tests/chaos/large.py                        20 GB of memory
    .venv/bin/python tests/chaos/large.py --values 50000000      4 GB

Start values and gradients follow from seeds, a piece of ten million values at a time. So the
average is known: the start, and the mean of what all added. A turn of a gossip thread is from one
wait for events to the next; in it a worker hears nobody. The wait for a core is left out.
"""

import argparse
import hashlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import cloudpickle
import psutil
import torch
import waiting
from torch import Tensor, nn

from gossipdp import Counting, GossipDataParallel, Network, WorkerFailedError, launch
from gossipdp.gossip.thread import GossipThread
from gossipdp.launcher.supervisor import Failure, describe
from gossipdp.links.tcp import TcpTransport

NUM_WORKERS, TIMEOUT_S, LIMIT_S, PIECE, ROUNDING = 3, 2.0, 1800.0, 10_000_000, 2.0**-24
# 12 bytes a value: parameters, what exchanges bring, the sums; and interpreter, torch, pieces.
BYTES_PER_VALUE, BYTES_BESIDES = 12, 700 << 20


def drawn(out: Tensor, *seeds: int) -> Tensor:
    """Fill ``out`` with what follows from the seeds: values between -1 and 1."""
    seed = hash(seeds) % 2**63  # of whole numbers it is the same in each process
    return out.uniform_(-1.0, 1.0, generator=torch.Generator().manual_seed(seed))


def watch_turns() -> dict[str, float]:
    """Return the longest turns of this process's gossip thread by phase, in ms, as they come."""
    wait, run, longest_ms, since = TcpTransport._collect_events, GossipThread._run, {"": 0.0}, []

    def own_s() -> float:
        """Return the time less that for which this thread has waited for a core, in seconds."""
        return time.monotonic() - int(os.pread(since[0], 64, 0).split()[1]) / 1e9

    def watched_run(thread: GossipThread) -> None:
        since.append(os.open("/proc/thread-self/schedstat", os.O_RDONLY))
        since.append(own_s())
        run(thread)

    def watched_wait(transport: TcpTransport, timeout_s: float) -> None:
        if since:  # one who joins asks about in its main thread first
            phase = [*longest_ms][-1]
            longest_ms[phase] = max(longest_ms[phase], 1e3 * (own_s() - since.pop()))
        wait(transport, timeout_s)
        if since:
            since.append(own_s())

    GossipThread._run, TcpTransport._collect_events = watched_run, watched_wait
    return longest_ms


def train(directory: Path, num_values: int, num_exchanges: int) -> dict[str, Any]:
    """Start, see another die and come again, exchange, consolidate, and look at the values."""
    longest_ms = watch_turns()
    rank, life = int(os.environ["RANK"]), int(os.environ.get("GOSSIPDP_RESTARTS") or 0)
    sizes = [min(PIECE, num_values - begin) for begin in range(0, num_values, PIECE)]
    pieces = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)
    if rank == 0:
        for index, piece in enumerate(pieces):
            drawn(piece.data, index)
    optimizer = torch.optim.SGD(pieces, lr=1.0)
    counting = Counting(samples_per_step=1)
    network = Network(timeout_s=TIMEOUT_S, start_timeout_s=LIMIT_S)
    model = GossipDataParallel(
        pieces, optimizer, graph="complete", method="gossip", counting=counting, network=network
    )

    def all_of(name: str) -> list[str]:
        """Return what those wrote that have come this far; only the last life of each counts."""
        paths = sorted(directory.glob(f"{name}-*"))
        return [each.read_text() for each in paths] if len(paths) == NUM_WORKERS else []

    def together(name: str, text: str = "-") -> list[str]:
        (directory / f".{name}-{rank}").write_text(text)
        (directory / f".{name}-{rank}").rename(directory / f"{name}-{rank}")
        waiting.wait_until(lambda: all_of(name), "the others have come as far", longest_s=LIMIT_S)
        return all_of(name)

    if life == 0:
        together("started")
        if rank == NUM_WORKERS - 1:  # all hold the start values yet: it takes nothing with it
            os.kill(os.getpid(), signal.SIGKILL)
    longest_ms["join"] = 0.0
    together("joined")
    longest_ms["exchange"], steps = 0.0, 0
    while not all_of("exchanged"):
        piece = pieces[steps % len(pieces)]
        piece.grad = drawn(torch.empty_like(piece), rank, steps, 1)
        optimizer.step()
        piece.grad, steps = None, steps + 1
        if model.stats().exchanges >= num_exchanges:
            (directory / f"exchanged-{rank}").touch()
    longest_ms["end"] = 0.0
    result, stats = model.consolidate(), model.stats()
    told = [tuple(map(int, each.split())) for each in together("end", f"{steps} {stats.exchanges}")]
    digest, error, largest = hashlib.blake2b(), 0.0, 0.0
    for index, piece in enumerate(each.detach() for each in pieces):
        digest.update(memoryview(piece.numpy()).cast("B"))
        if rank == 0:  # one looks, since all hold the same bits or not
            drawing = torch.empty_like(piece)
            expected = drawn(drawing, index).double()
            for other, (count, _) in enumerate(told):
                for step in range(index, count, len(pieces)):
                    expected.sub_(drawn(drawing, other, step, 1), alpha=1.0 / NUM_WORKERS)
            largest = max(largest, float(expected.abs().max()))
            error = max(error, float(expected.sub_(piece).abs_().max()))
    # Each step, and an exchange's delta, share and sum, round once; so does each of the last sums.
    counts, exchanges = zip(*told, strict=True)
    roundings = max(counts) / len(pieces) + 3 * max(exchanges) + NUM_WORKERS
    return {
        "rank": rank,
        "num_averaged": result.world_size,
        "steps_are_told": result.gradient_steps_by_rank == dict(enumerate(counts)),
        "exchanges": (stats.exchanges, stats.exchanges_failed),
        "digest": digest.hexdigest()[:16],
        "largest_error": error,
        "allowed_error": roundings * ROUNDING * largest,
        "longest_ms": longest_ms,
        "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def end_at_the_second(failure: Failure) -> None:
    """End the run at a failure after which nobody is started again: the others would wait."""
    if failure.restart_in_s is None:
        raise WorkerFailedError(describe([failure]))


def problems_of(end: dict[str, Any], digest: str, longest_ms: float) -> list[str]:
    """Return what is not as it should be."""
    checks = {
        f'it ended with "{end["num_averaged"]} of 3"': end["num_averaged"] == NUM_WORKERS,
        "it holds unlike bits": end["digest"] == digest,
        "it tells other steps than there were": end["steps_are_told"],
        "no rounding explains how far values are off": end["largest_error"] <= end["allowed_error"],
    } | {
        f"its gossip thread did not look up for {turn_ms:.0f} ms ({phase})": turn_ms < longest_ms
        for phase, turn_ms in end["longest_ms"].items()
    }
    return [f"worker {end['rank']}: {what}" for what, is_well in checks.items() if not is_well]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--values", type=int, default=500_000_000, help="of each worker, float32")
    parser.add_argument("--exchanges", type=int, default=4, help="of each worker before the end")
    parser.add_argument("--longest-ms", type=float, default=50.0, help="that a turn may take")
    parser.add_argument("--results", type=Path, default=Path("runs/large.json"), help="JSON file")
    arguments = parser.parse_args()
    needed = NUM_WORKERS * (BYTES_PER_VALUE * arguments.values + BYTES_BESIDES)
    if psutil.virtual_memory().available < needed:
        print(f"needs {needed / 2**30:.1f} GiB of free memory: give fewer --values")
        return 2
    cloudpickle.register_pickle_by_value(waiting)
    given = arguments.values, arguments.exchanges
    options = {"max_restarts": 1, "timeout_s": LIMIT_S, "on_failure": end_at_the_second}
    with tempfile.TemporaryDirectory() as directory:
        ends = launch(train, NUM_WORKERS, (Path(directory), *given), **options)
    problems = [
        each for end in ends for each in problems_of(end, ends[0]["digest"], arguments.longest_ms)
    ]
    results = {"values": arguments.values, "workers": ends, "problems": problems}
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps(results, indent=1) + "\n")
    print(arguments.results.read_text())
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
