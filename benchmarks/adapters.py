"""Adapters beside a large frozen base, on unequal machines behind home lines: loss at equal time.

    python examples/lora.py base.pt --make
    python benchmarks/adapters.py base.pt     writes benchmarks/results/adapters.{jsonl,json,md,png}

Model and data are those of examples/lora.py; docs/lora.md says what is measured. All that a rival
needs is given to it: batches or steps by speed, and no first broadcast of the base. Rows of
gossipdp are the command that a user would type, one on each machine. Learning rates are tuned by
factors of two, on a third of the time and a seed that the table does not have. The best of those
runs says how many steps fit into the time, average included.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import lora
import msgspec
import torch
from support.finished_runs import Simulations, best_rate, loss_of, next_rate
from support.hosts import EmulatedHosts, bytes_sent, missing
from support.quality_rows import RowName, make_optimizer
from support.report import Missing, Report, Spread, Table, results_folder, run_script
from support.rows import RowPlan
from support.timed_compute import TimedCompute
from torch import nn

from gossipdp_lab.tasks.workload import learning_rate_factor

NAME, KILLED = "adapters", "gossipdp, defaults, one killed"
ROWS = ("ddp", "ddp_bf16_by_speed", "local_sgd_by_speed@16", "gossipdp_full", "gossipdp")
STEP_S, SLOWNESS, BATCH = 0.5, (1.0, 1.5, 3.0), 8
SPEEDS = [1 / each for each in SLOWNESS]
MBITS_PER_S, DELAY_MS, VICTIM = 20.0, 30.0, 1
FIRST_RATES, TRIAL_STEPS, TUNING_SHARE, WINDOW_S, LONGEST_S = (4e-3, 8e-3), 12, 1 / 3, 10.0, 300.0
VARIABLES = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
FIELDS = ("row", "rate", "seed", "seconds", "kills", "units")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run: what tells it from others.

    units: steps of all workers, or of a synchronous row averages; 0: what fits if nothing delays.
    """

    row: str
    rate: float
    seed: int
    seconds: float
    kills: bool = False
    units: int = 0

    @property
    def name(self) -> RowName:
        return RowName.parse(self.row)

    def plan(self, rank: int) -> RowPlan:
        """Return the arguments of a worker's row."""
        sizes, periods = self.name.batch_sizes(BATCH, SPEEDS), self.name.periods(SPEEDS)
        unit = sum(size * each for size, each in zip(sizes, periods, strict=True))
        options = self.name.gossip_options("complete", "free")
        if options:
            from gossipdp import Network

            options |= {"network": Network(shared_memory="off")}
            unit = BATCH
        return RowPlan(
            rank=rank,
            samples=unit * (self.units or round(self.seconds / STEP_S * sum(SPEEDS))),
            seed=self.seed,
            batch_sizes=sizes,
            periods=periods,
            make_optimizer=lambda every: make_optimizer(p for p in every if p.requires_grad),
            options=options,
            own_pace=True,
        )


def work(folder: Path, base: Path) -> None:
    """Train as one worker; leave a line a step, and on the first machine the average."""
    job = msgspec.json.decode((folder / "job").read_bytes(), type=Job)
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    net, (text, held_out) = lora.adapted(base), lora.prose()
    most = int(held_out[0]) - lora.CONTEXT
    plan = job.plan(rank)
    step_s = STEP_S * SLOWNESS[rank] * plan.batch_size / BATCH
    compute = TimedCompute([*net.blocks, net], lambda: step_s)
    row = job.name.make(net, plan)
    numbers = b"%d %d %d" % (job.seed, os.getpid(), rank)
    generator = torch.Generator().manual_seed(zlib.crc32(numbers))
    with (folder / f"steps-{rank}").open("a", buffering=1) as steps:

        def note(loss: float) -> None:
            counts = row.account().get("exchanges", 0.0), bytes_sent(EmulatedHosts.interface)
            print(time.monotonic(), *counts, row.steps, loss, os.getpid(), file=steps)

        note(math.nan)
        while (progress := row.progress()) < 1:
            row.set_rate(job.rate * learning_rate_factor(progress))
            starts = torch.randint(most, (plan.batch_size,), generator=generator)
            compute.begin()
            loss = lora.loss_of(row.model, text, starts)
            row.step(loss)
            note(loss.item())
    row.finish()
    if rank == 0:
        torch.save({n: p for n, p in net.named_parameters() if p.requires_grad}, folder / "average")
    row.close()


def run(job: Job, base: Path, hosts: EmulatedHosts) -> dict[str, Any]:
    """Run the three machines' commands to their end, and score the average."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job").write_bytes(msgspec.json.encode(job))
        (folder / "secret").write_text("a secret of this benchmark")
        (folder / "secret").chmod(0o600)
        script = [str(Path(__file__).resolve()), str(base.resolve()), "--work", name]
        began_s, machines = time.monotonic(), []
        for rank, host in enumerate(hosts.names):
            words = ["ip", "netns", "exec", host, sys.executable]
            own = {**os.environ, **VARIABLES, "GLOO_SOCKET_IFNAME": hosts.interface}
            if job.name.gossip_options("complete"):
                place = ["--node-rank", str(rank), "--rendezvous", f"{hosts.addresses[0]}:29400"]
                place += ["--secret-file", f"{name}/secret", "--max-restarts", "1"]
                words += ["-m", "gossipdp", "run", "-n", "1", "--nnodes", "3", *place]
            else:
                own |= {"RANK": str(rank), "WORLD_SIZE": "3", **hosts.variables()}
            machines.append(subprocess.Popen([*words, *script], env=own, stdout=subprocess.DEVNULL))
        killed_s = math.inf
        try:
            while any(machine.poll() is None for machine in machines):
                time.sleep(0.05)
                now = time.monotonic()
                if now > began_s + job.seconds + LONGEST_S:
                    raise TimeoutError(f"{job.row} did not end")
                path = folder / f"steps-{VICTIM}"
                if job.kills and killed_s == math.inf and path.exists():
                    lines = path.read_text().splitlines() or ["inf 0"]
                    if now > float(lines[0].split()[0]) + job.seconds / 3:
                        os.kill(int(lines[-1].split()[-1]), signal.SIGKILL)
                        killed_s = now
        finally:
            for machine in machines:
                machine.kill()
        ended_s = (folder / "average").stat().st_mtime - time.time() + time.monotonic()
        steps = [
            [[float(word) for word in line.split()] for line in path.read_text().splitlines()]
            for path in (folder / f"steps-{rank}" for rank in range(len(hosts.names)))
        ]
        net = lora.adapted(base)
        net.load_state_dict(torch.load(folder / "average", weights_only=True), strict=False)
    found: dict[str, Any] = (
        msgspec.to_builtins(job) | {"loss": bits(net)} | figures(steps, ended_s, killed_s)
    )
    print(
        f"{job.row}, rate {job.rate:g}, seed {job.seed}: {found['loss']:.3f} bits a byte after "
        f"{found['ended_s']:.0f} s, {sum(found['steps']):.0f} steps",
        flush=True,
    )
    return found


def bits(net: nn.Module) -> float:
    """Return the loss on held-out text, bits a byte."""
    text, held_out = lora.prose()
    with torch.no_grad():
        losses = [lora.loss_of(net, text, each) * len(each) for each in held_out.split(64)]
    return float(sum(losses)) / len(held_out) / math.log(2)


def figures(steps: list[list[list[float]]], ended_s: float, killed_s: float) -> dict[str, Any]:
    """Return what the workers' lines say; a line: time, exchanges, bytes, steps, loss, process."""
    begun_s = max(lines[0][0] for lines in steps)
    seconds = max(lines[-1][0] for lines in steps) - begun_s
    windows = math.ceil(seconds / WINDOW_S)
    exchanges, made, back_s = [[0.0] * windows for _ in steps], [0.0] * len(steps), math.nan
    losses: list[list[float]] = [[] for _ in range(windows)]
    for rank, lines in enumerate(steps):
        for before, line in itertools.pairwise(lines):
            now, counted, _, taken, loss, process = line
            window = min(windows - 1, max(0, int((now - begun_s) / WINDOW_S)))
            is_same = process == before[-1]
            exchanges[rank][window] += counted - is_same * before[1]
            made[rank] += max(0.0, taken - is_same * before[3])
            losses[window].extend([loss] if math.isfinite(loss) else [])
            if now > killed_s and rank == VICTIM and counted > 0 and math.isnan(back_s):
                back_s = now - killed_s
    return {
        "trained_s": seconds,
        "ended_s": ended_s - begun_s,
        "steps": made,
        "exchanges": [sum(each) for each in exchanges],
        "sent_bytes": [lines[-1][2] - lines[0][2] for lines in steps],
        "killed_s": killed_s - begun_s if math.isfinite(killed_s) else None,
        "back_s": back_s if math.isfinite(back_s) else None,
        "exchanges_over_time": exchanges,
        "losses_over_time": [sum(each) / len(each) if each else None for each in losses],
    }


def measured(job: Job, runs: Simulations, base: Path, hosts: EmulatedHosts) -> dict[str, Any]:
    """Return the run, from the file or made now."""
    return runs.get(runs.key(msgspec.to_builtins(job)), lambda: run(job, base, hosts))


def in_time(job: Job, trial: dict[str, Any], took: str = "ended_s") -> Job:
    """Return the run with as many units as fit into its seconds, by another run of its row."""
    units = trial["units"] or sum(trial["steps"])
    return msgspec.structs.replace(job, units=int(units * job.seconds / trial[took]))


def tuned(row: str, options: argparse.Namespace, *place: Any) -> Job:
    """Return the row's run in the whole time, at its best learning rate."""
    job = Job(row=row, rate=FIRST_RATES[0], seed=0, seconds=options.seconds * TUNING_SHARE)
    if not job.name.gossip_options("complete"):
        trial = msgspec.structs.replace(job, units=max(1, TRIAL_STEPS // (job.name.period or 1)))
        # Without its average, of which a short run has too much.
        job = in_time(job, measured(trial, *place), "trained_s")
    tried: dict[float, dict[str, Any]] = {}
    while not (options.quick and tried):
        rate = next_rate({each: loss_of(tried[each]) for each in tried}, FIRST_RATES)
        if rate is None:
            break
        tried[rate] = measured(msgspec.structs.replace(job, rate=rate), *place)
    best = best_rate({each: loss_of(tried[each]) for each in tried})
    job = msgspec.structs.replace(job, rate=best, seconds=options.seconds)
    return in_time(job, tried[best])


def measure(options: argparse.Namespace, report: Report) -> dict[str, list[dict[str, Any]]]:
    """Tune and measure every row; by label."""
    runs = Simulations(results_folder(options.quick) / f"{NAME}.jsonl", FIELDS)
    found: dict[str, list[dict[str, Any]]] = {}
    with EmulatedHosts(len(SLOWNESS), MBITS_PER_S, DELAY_MS) as hosts:
        place = runs, options.base, hosts
        jobs = {(job := tuned(row, options, *place)).name.label: job for row in ROWS}
        jobs[KILLED] = msgspec.structs.replace([*jobs.values()][-1], kills=True)
        for seed in range(1, options.rounds + 1):
            for label, job in jobs.items():
                one = measured(msgspec.structs.replace(job, seed=seed), *place)
                found.setdefault(label, []).append(one)
    report.notes.append(f"The link emulator {hosts.account.removeprefix('the emulator ')}.")
    return found


def table(found: dict[str, list[dict[str, Any]]], alone: float) -> Table:
    def per_step(run: dict[str, Any]) -> float:
        return float(sum(run["exchanges"]) / sum(run["steps"]))

    def megabytes(run: dict[str, Any]) -> float:
        return float(sum(run["sent_bytes"]) / len(SLOWNESS) / run["trained_s"] * 3600 / 1e6)

    columns = (
        ("held-out bits a byte", lambda run: run["loss"], ".3f"),
        ("seconds, with the average", lambda run: run["ended_s"], ".0f"),
        ("steps, all", lambda run: sum(run["steps"]), ".0f"),
        ("averages or exchanges a step", per_step, ".2f"),
        ("MB an hour, each way", megabytes, ".0f"),
    )
    lines = [
        (
            label,
            f"{runs[0]['rate']:g}",
            *(Spread.of(map(f, runs)).text(form) for _, f, form in columns),
        )
        for label, runs in found.items()
    ]
    back = Spread.of(run["back_s"] for run in found.get(KILLED, []) if run["back_s"] is not None)
    return Table(
        f"Three unequal machines, {MBITS_PER_S:g} Mbit/s each way, {DELAY_MS:g} ms",
        ("", "learning rate", *(head for head, _, _ in columns)),
        lines,
        f"Medians of the seeds (least to greatest). The base alone: {alone:.3f} bits a byte. The "
        f"killed worker has exchanged again after {back.text('.1f')} s. A step of the third "
        "machine takes three times as long as one of the first. Bytes: by the interface, headers "
        "included, mean of the machines.",
    )


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw the loss over time of the first seed, and each machine's exchanges where one dies."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for label, (run, *_) in found.items():
        losses = [each or math.nan for each in run["losses_over_time"]]
        times_s = [WINDOW_S * (index + 0.5) for index in range(len(losses))]
        left.plot(times_s, [each / math.log(2) for each in losses], label=label)
    left.set(xlabel="seconds", ylabel="training loss of all workers, bits a byte")
    left.legend(fontsize=8, frameon=False)
    killed = found[KILLED][0]
    for rank, counts in enumerate(killed["exchanges_over_time"]):
        times_s = [WINDOW_S * (index + 0.5) for index in range(len(counts) - 1)]
        label = f"machine {rank + 1}, {STEP_S * SLOWNESS[rank]:g} s a step"
        right.plot(times_s, [count / WINDOW_S for count in counts[:-1]], label=label)
    line = {"color": "0.5", "linestyle": "--", "label": f"machine {VICTIM + 1}: kill -9"}
    right.axvline(killed["killed_s"], **line)
    right.set(xlabel="seconds", ylabel="exchanges a second", ylim=(0, None))
    right.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("base", type=Path, help="made by examples/lora.py --make")
    parser.add_argument("--seconds", type=float, default=180.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3, help="seeds")
    parser.add_argument("--quick", action="store_true", help="one seed of 20 s, untuned")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options.work, options.base)
        return
    if options.quick:
        options.seconds, options.rounds = 20.0, 1
    report = Report(NAME, "Adapters beside a frozen base, at home", quick=options.quick)
    if (why_not := missing()) is not None:
        report.missing.append(Missing("all rows", why_not))
        report.write({})
        return
    if not options.base.exists():
        raise ValueError(
            f"there is no {options.base}; python examples/lora.py {options.base} --make"
        )
    alone = bits(lora.adapted(options.base))
    found = measure(options, report)
    report.tables.append(table(found, alone))
    report.write({"base_alone": alone, "rows": found})
    draw(found, results_folder(options.quick) / f"{NAME}.png")


if __name__ == "__main__":
    run_script(main)
