"""``make many``, ``make large``: 64 workers, or three of 500 million values; is the end right?

    .venv/bin/python tests/chaos/many.py                     64 workers, a small model each
    .venv/bin/python tests/chaos/many.py --workers 3 --values 500000000 --method gossip \
        --exchanges 4 --timeout-s 2                          20 GB of memory; 50 million take 4

One worker dies once all have met, and comes back. All train until each has exchanged, and
consolidate. Start values and gradients follow from seeds and lie in one piece of ten million values
at a time. So the average is known: the start, and the mean of what all workers added.

Printed is the longest turn of a gossip thread, from one wait for events to the next: in it a worker
hears and answers nobody.
"""

import argparse
import hashlib
import json
import os
import platform
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import psutil
import torch
from torch import Tensor, nn
from waiting import wait_until

import gossipdp
from gossipdp import Counting, GossipDataParallel, Network, WorkerFailedError, launch
from gossipdp.gossip.thread import GossipThread
from gossipdp.launcher.supervisor import Failure, describe
from gossipdp.links.tcp import TcpTransport

LONGEST_TURN_MS = 50.0
PIECE = 10_000_000
# Parameters, what exchanges bring, the sums at the end; and the interpreter, torch, and pieces.
BYTES_PER_VALUE, BYTES_BESIDES = 12, 200 << 20
PIECES_BESIDES = 12
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
    """The longest turns of this process's gossip thread, by phase, without waits for a core."""

    def __init__(self) -> None:
        self.phase = PHASES[0]
        self.longest_ms = dict.fromkeys(PHASES, 0.0)

    def watch(self) -> None:
        """Watch the transport's one wait from outside; what is between two of them is a turn."""
        wait, run = TcpTransport._collect_events, GossipThread._run
        schedule = -1
        left_s = waited_s = 0.0

        def times() -> tuple[float, float]:
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


def train(directory: Path, arguments: argparse.Namespace, began_s: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    turns, num_workers = Turns(), arguments.workers
    turns.watch()
    rank, life = int(os.environ["RANK"]), int(os.environ.get("GOSSIPDP_RESTARTS") or 0)
    net = Values(arguments.values)
    pieces = list(net.parameters())
    if rank == 0:
        with torch.no_grad():
            for index, piece in enumerate(pieces):
                drawn(piece, index)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    network = Network(timeout_s=arguments.timeout_s, start_timeout_s=LIMIT_S)
    options: dict[str, Any] = {"counting": Counting(samples_per_step=1), "network": network}
    options |= {"graph": "exponential", "method": arguments.method}
    model = GossipDataParallel(net, optimizer, **options)
    came_s = []

    def begin(phase: str) -> None:
        turns.phase = phase
        came_s.append(time.monotonic() - began_s)

    def together(name: str, told: str = "") -> list[str]:
        """Go on once all have come this far, and return what the last life of each tells."""
        path = directory / f"{name}-{rank}"
        path.with_suffix(".new").write_text(told)
        path.with_suffix(".new").rename(path)
        paths = [directory / f"{name}-{each}" for each in range(num_workers)]
        pause = partial(time.sleep, 0.05)
        wait_until(lambda: all(map(Path.exists, paths)), "all come this far", pause, LIMIT_S)
        return [each.read_text() for each in paths]

    if life == 0:
        together("started")
        if rank == num_workers - 1:
            # All hold the start values yet, so its death takes nothing with it.
            os.kill(os.getpid(), signal.SIGKILL)
    begin("join")
    together("joined")
    begin("exchange")
    steps = 0
    while len(list(directory.glob("exchanged-*"))) < num_workers:
        piece = pieces[steps % len(pieces)]
        piece.grad = drawn(torch.empty_like(piece), rank, steps, 1)
        optimizer.step()
        piece.grad = None
        steps += 1
        if model.stats().exchanges >= arguments.exchanges:
            (directory / f"exchanged-{rank}").touch()
        time.sleep(0.05)  # leaves the cores to the others
    begin("end")
    result = model.consolidate()
    came_s.append(time.monotonic() - began_s)
    own, stats = psutil.Process(), model.stats()
    told = [line.split() for line in together("steps", f"{steps} {stats.exchanges}")]
    counts = [int(steps) for steps, _ in told]
    digest = hashlib.blake2b()
    for piece in pieces:
        digest.update(memoryview(piece.detach().numpy()).cast("B"))
    # One looks, since all hold the same bits or not.
    error, largest = largest_error(pieces, counts) if rank == 0 else (0.0, 0.0)
    # Each step, and an exchange's delta, share and sum, round once; so does each of the last sums.
    most_exchanges = max(int(exchanges) for _, exchanges in told)
    roundings = max(counts) / len(pieces) + 3 * most_exchanges + num_workers
    return {
        "rank": rank,
        "num_averaged": result.world_size,
        "steps": steps,
        "steps_by_rank": result.gradient_steps_by_rank,
        "exchanges": stats.exchanges,
        "exchanges_failed": stats.exchanges_failed,
        "digest": digest.hexdigest()[:16],
        "largest_error": error,
        "allowed_error": roundings * ROUNDING * largest,
        "longest_ms": turns.longest_ms,
        "came_s": came_s,  # to each phase, and to the end
        "memory_mb": own.memory_full_info().pss / 2**20,
        "descriptors": own.num_fds(),
    }


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


def end_at_the_second(failures: list[Failure], failure: Failure) -> None:
    """End the run at the second failure, after which nobody is started again: others would wait."""
    failures.append(failure)
    if len(failures) == 2:
        raise WorkerFailedError(describe(failures))


def problems_of(ends: list[dict[str, Any]], longest_ms: float) -> list[str]:
    problems = ["workers hold unlike bits"] if len({end["digest"] for end in ends}) > 1 else []
    steps = {end["rank"]: end["steps"] for end in ends}
    for end in ends:
        who, error, allowed = (end[name] for name in ("rank", "largest_error", "allowed_error"))
        if end["num_averaged"] != len(ends):
            problems.append(f"worker {who} ended with {end['num_averaged']} of {len(ends)}")
        if end["steps_by_rank"] != steps:
            problems.append(f"worker {who} tells steps {end['steps_by_rank']}, not {steps}")
        if not error <= allowed:
            problems.append(f"values are off by up to {error:g}, and rounding explains {allowed:g}")
        problems += [
            f"the gossip thread of worker {who} did not look up for {turn_ms:.0f} ms ({phase})"
            for phase, turn_ms in end["longest_ms"].items()
            if turn_ms >= longest_ms
        ]
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=64, help="how many")
    parser.add_argument("--values", type=int, default=38_000, help="of each worker, float32")
    parser.add_argument("--method", default="a2cid2", help="gossip holds 4 bytes a value less")
    parser.add_argument("--exchanges", type=int, default=1, help="of each worker before the end")
    parser.add_argument("--timeout-s", type=float, default=5.0, help="of silence, as of Network")
    parser.add_argument("--longest-ms", type=float, default=LONGEST_TURN_MS, help="of a turn")
    parser.add_argument("--results", type=Path, default=Path("runs/many.json"), help="JSON file")
    arguments = parser.parse_args()
    beside = BYTES_BESIDES + PIECES_BESIDES * 4 * min(PIECE, arguments.values)
    needed = arguments.workers * (BYTES_PER_VALUE * arguments.values + beside)
    available = psutil.virtual_memory().available
    print(f"needs {needed / 2**30:.1f} GiB of memory; {available / 2**30:.1f} are free", flush=True)
    if available < needed:
        return 2
    os.environ["OMP_NUM_THREADS"] = "1"
    ends: list[dict[str, Any]] = []
    problems: list[str] = []
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        try:
            what, ended = (Path(directory), arguments, began_s), partial(end_at_the_second, [])
            ends = launch(
                train, arguments.workers, what, on_failure=ended, max_restarts=1, timeout_s=LIMIT_S
            )
        except WorkerFailedError as error:
            problems.append(str(error))
    problems += problems_of(ends, arguments.longest_ms)
    results: dict[str, Any] = {
        "command": f"python tests/chaos/many.py {' '.join(sys.argv[1:])}".strip(),
        "version": gossipdp.__version__,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}",
        "load_average": os.getloadavg()[0],
        "seconds": round(time.monotonic() - began_s, 1),
        "workers": ends,
        "problems": problems,
    }
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps(results, indent=1) + "\n")
    turns_ms = [turn_ms for end in ends for turn_ms in end["longest_ms"].values()]
    print(f"longest turn: {max(turns_ms, default=0.0):.1f} ms")
    print(f"{results['seconds']} s; {len(problems)} problems; written to {arguments.results}")
    for problem in problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
