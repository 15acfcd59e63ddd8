"""All that a card can settle, in at most ten minutes: is gossipdp right there, and how fast.

    python benchmarks/card.py [--only tests speed]   writes benchmarks/results/card.{json,md}

Each part is a process of its own and has a deadline: if it fails, the others go on, and the result
says why it is missing. Without a card this says so and ends with status 2. `--device cpu --quick`
runs all parts on the CPU, tiny, to see that they work; those figures show nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from support.meeting import Meeting
from support.report import Missing, Report, Spread, Table, interleaved
from torch import Tensor, nn

from gossipdp import Counting, GossipDataParallel, launch
from gossipdp.dynamics import update
from gossipdp.dynamics.chunks import Role
from gossipdp.dynamics.state import Segment, State
from gossipdp.gossip.codec import tensor_bytes
from gossipdp.protocol.worker import Method
from gossipdp_lab.tasks.resnet import cifar_resnet18

ROOT = Path(__file__).parents[1]
TESTS = ("tests/unit/dynamics/test_device.py", "tests/integration/test_device.py")
ALL_S, PATIENCE_S = 600.0, 5.0
ALPHA_TILDE = 1.3
Result = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """The place of the parameters; ``quick``: tiny sizes."""

    device: str
    quick: bool

    def finish(self) -> None:
        if self.device != "cpu":
            torch.accelerator.synchronize()

    def median_ms(self, run: Callable[[], object], num_runs: int = 5) -> float:
        """Return the median time of a run; the first run does not count."""
        times = []
        for _ in range(num_runs + 1):
            self.finish()
            started_s = time.perf_counter()
            run()
            self.finish()
            times.append(1e3 * (time.perf_counter() - started_s))
        return Spread.of(times[1:]).median


# The parts.


def measure_tests(settings: Settings) -> Result:
    """Run the tests that need a card; without one, find them."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", *TESTS]
    if settings.device == "cpu":
        command.append("--collect-only")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"tests fail:\n{done.stdout[-4000:]}")
    return {"summary": done.stdout.strip().splitlines()[-1]}


def show_tests(found: Result) -> Table:
    return Table("Tests on the card", ("",), [(found["summary"],)])


def measure_speed(settings: Settings) -> Result:
    """Time the exchange and the boundary beside a copy on the device, by size of chunk."""
    num_values = 10_000 if settings.quick else 124_000_000
    source, target = torch.randn(2, num_values, device=settings.device)
    out, peers = torch.zeros(2, num_values)
    found: Result = {"num_values": num_values, "rows": []}
    found["copy_ms"] = settings.median_ms(lambda: target.copy_(source))
    pinned: list[object] = []
    for chunk_bytes in (1 << 20, 1 << 22, 1 << 24, 1 << 25, 1 << 26):
        segment = Segment(source.clone(), Role.TRAINED, chunk_bytes=chunk_bytes)
        state = State([segment])
        if not pinned:  # as the memory that workers of one host share
            pinned = [state.device.pin(tensor_bytes(each), is_peers=False) for each in (out, peers)]
        theta = iter(range(1, 1000))

        def exchange(state: State = state, segment: Segment = segment, theta: Any = theta) -> None:
            now = 0.01 * next(theta)
            with state.device.gossip_thread():
                pairs = zip(segment.split(out), segment.split(peers), strict=True)
                for (chunk, mine), (_, theirs) in pairs:
                    chunk.snapshot(now, mine)
                    chunk.exchange(now, mine, theirs, ALPHA_TILDE)

        def arithmetic(segment: Segment = segment) -> None:
            assert segment.c is not None
            for chunk, there in segment.split(target):
                x, pending, c = chunk.x, chunk.pending, chunk.c
                update.snapshot(there, x, pending, c, 0.01, compiled=False)
                update.exchange(pending, c, there, x, 0.01, 0.9, ALPHA_TILDE)

        def boundary(state: State = state) -> None:
            for chunk in state.chunks:
                chunk.has_pending = True
            state.boundary(0.0)

        times = [settings.median_ms(run) for run in (exchange, arithmetic, boundary)]
        times.append(_device_ms(boundary) if settings.device != "cpu" else times[-1])
        found["rows"].append((chunk_bytes >> 20, len(state.chunks), *times))
    return found


def _device_ms(run: Callable[[], object], num_runs: int = 5) -> float:
    """Return the median time that the device works on it, where the host is far ahead."""
    times = []
    ahead = torch.randn(8192, 8192, device="cuda")
    for _ in range(num_runs + 1):
        torch.mm(ahead, ahead)  # 20 ms or more, in which the host queues the rest
        started, ended = (torch.Event("cuda", enable_timing=True) for _ in "ab")
        started.record()
        run()
        ended.record()
        ended.synchronize()
        times.append(started.elapsed_time(ended))
    return Spread.of(times[1:]).median


def show_speed(found: Result) -> Table:
    # A copy moves 8 bytes a value. A boundary reads and writes x and the inbox: 16. The arithmetic
    # of an exchange reads x, pending and c, and writes the snapshot (16); then it reads both
    # snapshots, pending and c, and writes pending and c (24).
    copy_ms = found["copy_ms"]
    rows = [
        (f"{size} MiB", str(number), f"{exchange:.2f}",
         f"{arithmetic:.2f}", f"{copy_ms * 40 / 8 / arithmetic:.0%}",
         f"{boundary:.2f}", f"{device:.2f}", f"{copy_ms * 16 / 8 / device:.0%}")
        for size, number, exchange, arithmetic, boundary, device in found["rows"]
    ]  # fmt: skip
    head = ("chunks of", "chunks", "exchange (ms)", "its arithmetic (ms)", "of the copy's speed",
            "boundary (ms)", "of that the device", "of the copy's speed")  # fmt: skip
    note = (
        f"One copy on the device, which reads and writes each value once: {copy_ms:.2f} ms. An "
        "exchange also moves two snapshots between the device and the host. Shares are of the "
        "bytes that must be moved at least."
    )
    return Table(f"{found['num_values']:,} float32 values", head, rows, note)


class Gpt(nn.Module):
    """A small decoder: 36 million parameters, contexts of 256 tokens."""

    def __init__(self, width: int = 512, num_layers: int = 6, num_tokens: int = 16_384) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 64 or 1, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.last = nn.Linear(width, num_tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next tokens, (batch * length, num_tokens)."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        hidden = self.layers(self.embedding(tokens), mask=mask, is_causal=True)
        logits: Tensor = self.last(hidden)
        return logits.flatten(0, 1)


@dataclass(frozen=True)
class Case:
    """A training: ``model`` is ``resnet18`` or ``gpt``; the others are those of the wrapper."""

    model: str
    num_workers: int
    method: Method = "a2cid2"
    comm_rate: float | Literal["auto"] = "auto"

    def made(self, settings: Settings) -> tuple[nn.Module, Tensor, Tensor]:
        """Return the model, and the inputs and targets of every step."""
        batch = 2 if settings.quick else 64
        if self.model == "gpt":
            tokens = torch.randint(64, (batch, 17 if settings.quick else 257))
            net: nn.Module = Gpt(32, 1, 64) if settings.quick else Gpt()
            return net, tokens[:, :-1], tokens[:, 1:].flatten()
        side = 8 if settings.quick else 32
        return cifar_resnet18(), torch.randn(batch, 3, side, side), torch.randint(10, (batch,))


def train(case: Case, settings: Settings, meeting_path: Path) -> Result:
    """Train in one worker for a time; return its steps per second and its losses."""
    meeting = Meeting(meeting_path, int(os.environ["RANK"]))
    torch.manual_seed(0)
    net, inputs, targets = case.made(settings)
    net.to(settings.device)
    inputs, targets = inputs.to(settings.device), targets.to(settings.device)
    fused = True if settings.device != "cpu" else None
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=fused)
    model = GossipDataParallel(
        net,
        optimizer,
        method=case.method,
        comm_rate=case.comm_rate,
        counting=Counting(samples_per_step=len(inputs)),
    )
    # Convolutions in bfloat16 take minutes on a CPU that has no instructions for them.
    is_mixed = settings.device != "cpu" or case.model == "gpt"
    autocast = torch.autocast(torch.device(settings.device).type, torch.bfloat16, is_mixed)
    turn_s = 0.0 if settings.quick else 5.0
    losses: list[Tensor] = []
    for is_timed in (False, True):
        meeting.meet()
        started_s, first = time.perf_counter(), len(losses)
        while len(losses) < first + 3 or (is_timed and time.perf_counter() - started_s < turn_s):
            optimizer.zero_grad()
            with autocast:
                loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        settings.finish()
        steps_per_s = (len(losses) - first) / (time.perf_counter() - started_s)
    meeting.meet()
    stats = model.stats()
    model.close()
    return {
        "steps_per_s": steps_per_s,
        "losses": [float(losses[0]), float(losses[-1])],
        "comm_rate": stats.achieved_comm_rate,
        "kernels": stats.kernels,
    }


def measure_training(settings: Settings) -> Result:
    """Train with gossip and without on 2 and 4 workers of one card, in bfloat16 autocast."""

    def measure(case: Case) -> Result:
        with tempfile.TemporaryDirectory() as folder:
            meeting = Path(folder) / "meeting"
            Meeting.create(meeting, case.num_workers)
            found = launch(train, case.num_workers, (case, settings, meeting))
        return {
            "steps_per_s": sum(each["steps_per_s"] for each in found),
            "comm_rate": sum(each["comm_rate"] for each in found) / case.num_workers,
            "losses": found[0]["losses"],
            "kernels": found[0]["kernels"],
        }

    cases = [
        Case(model, num_workers, **how)
        for num_workers in ((2,) if settings.quick else (2, 4))
        for model in ("gpt", "resnet18")
        for how in ({"method": "none"}, {}, {"comm_rate": 1.0})
        if "comm_rate" not in how or (model == "gpt" and num_workers == 2)
    ]
    found = interleaved(cases, 1 if settings.quick else 2, measure)
    return {
        "rows": [
            {
                "model": case.model,
                "workers": case.num_workers,
                "how": "none" if case.method == "none" else f"gossip, comm rate {case.comm_rate}",
                "runs": runs,
            }
            for case, runs in found.items()
        ]
    }


def show_training(found: Result) -> Table:
    rows = [
        (
            f"{each['model']}, {each['workers']} workers, {each['how']}",
            Spread.of(run["steps_per_s"] for run in each["runs"]).text(".1f"),
            f"{each['runs'][-1]['comm_rate']:.2f}",
            f"{each['runs'][-1]['losses'][0]:.3f}",
            f"{each['runs'][-1]['losses'][1]:.3f}",
            each["runs"][-1]["kernels"],
        )
        for each in found["rows"]
    ]
    head = ("", "steps/s, all workers", "comm rate", "first loss", "last loss", "kernels")
    return Table("bfloat16 autocast, AdamW, one batch again and again", head, rows)


def survive(settings: Settings, killed: Path) -> Result | None:
    """Train in one worker; worker 1 kills itself once, comes back, and ends the run."""
    net = nn.Linear(512, 512).to(settings.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    model = GossipDataParallel(net, optimizer, counting=Counting(samples_per_step=8))
    inputs, is_second = torch.randn(8, 512).to(settings.device), killed.exists()
    while not model.finished:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        if model.rank == 1 and model.stats().exchanges >= 3:
            if not is_second:
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            model.stop()
    result = model.consolidate()
    notices = [(notice.kind, notice.at_s) for notice in model.stats().noticed if notice.rank == 1]
    return {"averaged": result.world_size, "notices": notices}


def measure_rejoin(settings: Settings) -> Result:
    """Kill a worker on the card; return when the other saw it end, and come back."""
    with tempfile.TemporaryDirectory() as folder:
        killed = Path(folder) / "killed"
        found = launch(survive, 2, (settings, killed), max_restarts=1)
        killed_s = time.clock_gettime(time.CLOCK_BOOTTIME) - (time.time() - killed.stat().st_mtime)
    (averaged,) = {each["averaged"] for each in found}
    after = {kind: at_s - killed_s for kind, at_s in found[0]["notices"]}
    return {"averaged": averaged, "lost_s": after["lost"], "restarted_s": after["restarted"]}


def show_rejoin(found: Result) -> Table:
    rows = [
        ("the other noticed (s)", f"{found['lost_s']:.2f}"),
        ("it took part again (s)", f"{found['restarted_s']:.1f}"),
        ("workers in the average", str(found["averaged"])),
    ]
    return Table("A worker of two is killed", ("", ""), rows)


@dataclass(frozen=True)
class Part:
    """One part of the benchmark; ``limit_s``: its deadline."""

    name: str
    limit_s: float
    measure: Callable[[Settings], Result]
    show: Callable[[Result], Table]


# What matters most comes first, should the time run out.
PARTS = (
    Part("tests", 120.0, measure_tests, show_tests),
    Part("speed", 60.0, measure_speed, show_speed),
    Part("training", 330.0, measure_training, show_training),
    Part("rejoin", 100.0, measure_rejoin, show_rejoin),
)


def run_apart(command: Sequence[str], limit_s: float) -> str | None:
    """Run a process and all that it starts; return why it has not done its work, or None."""
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"not done after {limit_s:.0f} s"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode == 0:
        return None
    lines = errors.strip().splitlines() or [f"exit status {process.returncode}"]
    sys.stderr.write(errors)
    return lines[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    parser.add_argument("--part-to", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    settings = Settings(options.device, options.quick)
    parts = [part for part in PARTS if options.only is None or part.name in options.only]
    if options.device != "cpu" and not torch.accelerator.is_available():
        print("There is no card here, so nothing was measured.", file=sys.stderr)
        sys.exit(2)
    if options.part_to is not None:
        (part,) = parts
        options.part_to.write_text(json.dumps(part.measure(settings)))
        return
    is_trial = options.quick or options.device == "cpu"
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else options.device
    report = Report("card", f"gossipdp on a card ({name})", is_trial)
    ends_s, results = time.monotonic() + ALL_S, {}
    for part in parts:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "result.json"
            command = [sys.executable, __file__, "--only", part.name, "--part-to", str(path)]
            command += ["--device", options.device, *(["--quick"] if options.quick else [])]
            print(f"{part.name}: at most {part.limit_s:.0f} s", flush=True)
            why = run_apart(command, max(1.0, min(part.limit_s, ends_s - time.monotonic())))
            if why is None:
                results[part.name] = json.loads(path.read_text())
                report.tables.append(part.show(results[part.name]))
            else:
                report.missing.append(Missing(part.name, why))
    report.write(results)
    if report.missing:
        sys.exit(1)


if __name__ == "__main__":
    main()
