"""``make large``: three workers of 500 million values, a time-out of 2 s, and the end is right.

    .venv/bin/python tests/chaos/large.py                        20 GB of memory
    .venv/bin/python tests/chaos/large.py --values 50000000      4 GB

Each worker holds its parameters, what exchanges bring, and at the end the sums: 12 bytes a value.
Start values and gradients follow from seeds and lie in one piece of ten million values at a time.
So the average is known: the start, and the mean of what all workers added.

Printed is the longest turn of a gossip thread: from one wait for events to the next. In it a worker
hears and answers nobody. The time for which the thread waited for a core is left out.
"""

import argparse
import hashlib
import json
import os
import platform
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

import gossipdp
from gossipdp import Counting, GossipDataParallel, Network, WorkerFailedError, launch
from gossipdp.gossip.thread import GossipThread
from gossipdp.launcher.supervisor import Failure, describe
from gossipdp.links.tcp import TcpTransport

SCRIPT = "tests/chaos/large.py"
NUM_WORKERS = 3
TIMEOUT_S = 2.0
LONGEST_TURN_MS = 50.0
PIECE = 10_000_000
BYTES_PER_VALUE = 12
# Interpreter, torch, pieces of gradients, of the reference and of chunks on their way.
BYTES_BESIDES = 700 << 20
LIMIT_S = 1800.0
ROUNDING = 2.0**-24
# The start, in which all meet; another's coming, to whom a worker gives its state; training with
# exchanges; and the end.
PHASES = ("start", "join", "exchange", "end")


class Values(nn.Module):
    """Parameters that nothing has been written to yet, so that they take no memory."""

    def __init__(self, num_values: int) -> None:
        super().__init__()
        for index, begin in enumerate(range(0, num_values, PIECE)):
            piece = torch.zeros(min(PIECE, num_values - begin))
            self.register_parameter(f"piece{index}", nn.Parameter(piece))


def drawn(out: Tensor, *seeds: int) -> Tensor:
    """Fill ``out`` with what follows from the seeds: values between -1 and 1."""
    seed = hash(seeds) % 2**63  # of whole numbers it is the same in each process
    return out.uniform_(-1.0, 1.0, generator=torch.Generator().manual_seed(seed))


class Turns:
    """The longest turns of this process's gossip thread, by phase, in milliseconds.

    They leave out the time in which the thread was ready to run and no core was free.
    """

    def __init__(self) -> None:
        self.phase = PHASES[0]
        self.longest_ms = dict.fromkeys(PHASES, 0.0)

    def watch(self) -> None:
        """Watch the transport's one wait from outside; what is between two of them is a turn."""
        wait, run = TcpTransport._collect_events, GossipThread._run
        schedule = -1
        left_s = waited_s = 0.0

        def times() -> tuple[float, float]:
            """Return the time, and for how long this thread has waited for a core, in seconds."""
            return time.monotonic(), int(os.pread(schedule, 64, 0).split()[1]) / 1e9

        def watched_run(thread: GossipThread) -> None:
            nonlocal schedule, left_s, waited_s
            schedule = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            left_s, waited_s = times()
            run(thread)

        def watched_wait(transport: TcpTransport, timeout_s: float) -> None:
            nonlocal left_s, waited_s
            if schedule < 0:  # one who joins asks about in its main thread first
                wait(transport, timeout_s)
                return
            now_s, now_waited_s = times()
            own_ms = 1e3 * (now_s - left_s - (now_waited_s - waited_s))
            self.longest_ms[self.phase] = max(self.longest_ms[self.phase], own_ms)
            wait(transport, timeout_s)
            left_s, waited_s = times()

        GossipThread._run = watched_run  # type: ignore[method-assign]
        TcpTransport._collect_events = watched_wait  # type: ignore[method-assign]


@dataclass(frozen=True)
class End:
    """One worker's report."""

    rank: int
    num_averaged: int
    steps: int
    steps_by_rank: dict[int, int]
    exchanges: int
    exchanges_failed: int
    digest: str
    largest_error: float
    allowed_error: float
    longest_ms: dict[str, float]
    end_s: float
    memory_gb: float


def train(directory: Path, num_values: int, num_exchanges: int) -> End:
    """Start, see another die and come again, exchange, consolidate, and look at the values."""
    turns = Turns()
    turns.watch()
    rank, life = int(os.environ["RANK"]), int(os.environ.get("GOSSIPDP_RESTARTS") or 0)
    net = Values(num_values)
    pieces = list(net.parameters())
    if rank == 0:
        with torch.no_grad():
            for index, piece in enumerate(pieces):
                drawn(piece, index)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    model = GossipDataParallel(
        net,
        optimizer,
        graph="complete",
        method="gossip",
        counting=Counting(samples_per_step=1),
        network=Network(timeout_s=TIMEOUT_S, start_timeout_s=LIMIT_S),
    )

    def together(name: str) -> None:
        """Go on once all have come this far; only the last life of each counts."""
        (directory / f"{name}-{rank}").touch()
        wait_until(lambda: len(list(directory.glob(f"{name}-*"))) == NUM_WORKERS)

    if life == 0:
        together("started")
        if rank == NUM_WORKERS - 1:
            # All hold the start values yet, so its death takes nothing with it.
            os.kill(os.getpid(), signal.SIGKILL)
    turns.phase = "join"
    together("joined")
    turns.phase = "exchange"
    steps = 0
    while not (directory / "enough").exists():
        piece = pieces[steps % len(pieces)]
        piece.grad = drawn(torch.empty_like(piece), rank, steps, 1)
        optimizer.step()
        piece.grad = None
        steps += 1
        if model.stats().exchanges >= num_exchanges:
            (directory / f"exchanged-{rank}").touch()
            if len(list(directory.glob("exchanged-*"))) == NUM_WORKERS:
                (directory / "enough").touch()
    turns.phase = "end"
    asked_s = time.monotonic()
    result = model.consolidate()
    end_s = time.monotonic() - asked_s
    stats = model.stats()
    (directory / f"steps-{rank}").write_text(f"{steps} {stats.exchanges}")
    wait_until(lambda: len(list(directory.glob("steps-*"))) == NUM_WORKERS)
    told = [
        tuple(map(int, (directory / f"steps-{each}").read_text().split()))
        for each in range(NUM_WORKERS)
    ]
    counts = [steps for steps, _ in told]
    digest = hashlib.blake2b()
    for piece in pieces:
        digest.update(memoryview(piece.detach().numpy()).cast("B"))
    # One looks, since all hold the same bits or not.
    error, largest = largest_error(pieces, counts) if rank == 0 else (0.0, 0.0)
    # Each step, and an exchange's delta, share and sum, round once; so does each of the last sums.
    roundings = max(counts) / len(pieces) + 3 * max(each for _, each in told) + NUM_WORKERS
    return End(
        rank=rank,
        num_averaged=result.world_size,
        steps=steps,
        steps_by_rank=result.gradient_steps_by_rank,
        exchanges=stats.exchanges,
        exchanges_failed=stats.exchanges_failed,
        digest=digest.hexdigest()[:16],
        largest_error=error,
        allowed_error=roundings * ROUNDING * largest,
        longest_ms=turns.longest_ms,
        end_s=end_s,
        memory_gb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the others did not come as far in {LIMIT_S:g} s")
        time.sleep(0.05)


@torch.no_grad()
def largest_error(pieces: list[nn.Parameter], counts: list[int]) -> tuple[float, float]:
    """Return how far the values are from the mean in float64, at most, and the largest value."""
    error = largest = 0.0
    for index, piece in enumerate(pieces):
        drawing = torch.empty_like(piece)
        expected = drawn(drawing, index).double()
        for rank, steps in enumerate(counts):
            for step in range(index, steps, len(pieces)):
                expected.sub_(drawn(drawing, rank, step, 1), alpha=1.0 / len(counts))
        largest = max(largest, float(expected.abs().max()))
        error = max(error, float(expected.sub_(piece).abs_().max()))
    return error, largest


def end_at_the_second(failure: Failure) -> None:
    """End the run at a failure after which nobody is started again: the others would wait."""
    if failure.restart_in_s is None:
        raise WorkerFailedError(describe([failure]))


def problems_of(ends: list[End], longest_ms: float) -> list[str]:
    """Return what is not as it should be."""
    problems = [
        f'worker {end.rank} ended with "{end.num_averaged} of {NUM_WORKERS}"'
        for end in ends
        if end.num_averaged != NUM_WORKERS
    ]
    if len({end.digest for end in ends}) > 1:
        problems.append("workers hold unlike bits")
    steps = {end.rank: end.steps for end in ends}
    problems += [
        f"worker {end.rank} tells steps {end.steps_by_rank}, and they were {steps}"
        for end in ends
        if end.steps_by_rank != steps
    ]
    for end in ends:
        if not end.largest_error <= end.allowed_error:
            problems.append(
                f"values are off by up to {end.largest_error:g}, which no rounding explains: "
                f"{end.allowed_error:g}"
            )
        problems += [
            f"the gossip thread of worker {end.rank} did not look up for {turn_ms:.0f} ms ({phase})"
            for phase, turn_ms in end.longest_ms.items()
            if turn_ms >= longest_ms
        ]
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--values", type=int, default=500_000_000, help="of each worker, float32")
    parser.add_argument("--exchanges", type=int, default=4, help="of each worker before the end")
    parser.add_argument(
        "--longest-ms", type=float, default=LONGEST_TURN_MS, help="that a turn may take"
    )
    parser.add_argument("--results", type=Path, default=Path("runs/large.json"), help="JSON file")
    arguments = parser.parse_args()
    needed = NUM_WORKERS * (BYTES_PER_VALUE * arguments.values + BYTES_BESIDES)
    available = psutil.virtual_memory().available
    print(f"needs {needed / 2**30:.1f} GiB of memory; {available / 2**30:.1f} are free", flush=True)
    if available < needed:
        print(f"too little memory for {arguments.values:,} values: give fewer --values")
        return 2
    ends: list[End] = []
    problems: list[str] = []
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        try:
            ends = launch(
                train,
                NUM_WORKERS,
                (Path(directory), arguments.values, arguments.exchanges),
                max_restarts=1,
                timeout_s=LIMIT_S,
                on_failure=end_at_the_second,
            )
        except WorkerFailedError as error:
            problems.append(str(error))
    if ends:
        print(f"values off by {ends[0].largest_error:.2g}, allowed {ends[0].allowed_error:.2g}")
        longest_ms = max(max(end.longest_ms.values()) for end in ends)
        print(f"longest turn: {longest_ms:.1f} ms")
    problems += problems_of(ends, arguments.longest_ms)
    seconds = time.monotonic() - began_s
    results: dict[str, Any] = {
        "command": f"python {SCRIPT} --values {arguments.values} --exchanges {arguments.exchanges}",
        "version": gossipdp.__version__,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}",
        "seconds": round(seconds, 1),
        "timeout_s": TIMEOUT_S,
        "workers": [asdict(end) for end in ends],
        "problems": problems,
    }
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{seconds:.0f} s; {len(problems)} problems; written to {arguments.results}")
    for problem in problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
