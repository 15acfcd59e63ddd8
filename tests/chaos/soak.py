"""``make soak``: half an hour of everything at once, and is all flat and the end right.

    .venv/bin/python tests/chaos/soak.py                            30 minutes, 8 workers
    .venv/bin/python tests/chaos/soak.py --minutes 2 --seed 17

Workers of ``gossipdp run``, each with 256 descriptors at most and all with a /dev/shm of 64 MB (as
root), train while a link of theirs is cut every second, to the end; now and then one is stopped
for 3 s, or killed and started again, others join and leave, all save checkpoints, and one makes an
average.
Even ranks live all the time: their memory, descriptors and threads are the longest series. What
happens follows from the seed as far as the machine's speed allows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import secrets
import shlex
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import numpy as np
import psutil
import torch
from broken_links import cut, drawn_link
from known_average import assert_is_mean
from rich.console import Console
from run_processes import VARIABLES, RunCommand, runs

import gossipdp
from gossipdp_lab.console import ProgressView

SCRIPT = "tests/chaos/soak.py"
WORKER = Path(__file__).with_name("soak_worker.py")
SHM = "size=64m"
# For eight interpreters that import torch on a busy machine, and for the end.
PATIENCE_S = 300.0
# What a killed worker made in its last time-out may be known to nobody.
UNTOLD_S = 5.0
CUT_EVERY_S = 1.0
STOPS = "stop 3s every 30s"  # shorter than the time-out: none may be missing at the end
AGAIN_S = 1.0  # until what could not happen is tried again
SAMPLE_EVERY_S = 5.0
STRETCH_MINUTES = 0.5
# Of a life, before it is judged, and the least that it has to last after that. In the first minutes
# the allocator comes to rest, by steps of a MB or two.
WARM_UP_MINUTES, JUDGED_MINUTES = 5.0, 10.0
BATCH = 16
# What is sampled, its unit, and what its slope, less two standard errors, may be a minute. Links
# are no descriptors here: of them there is one to a peer at most.
MEASURES = {"memory": ("MB", 0.5), "descriptors": ("", 0.1), "threads": ("", 0.1)}
# Beyond one to each worker that there is: those just cut, and those that two dial at once.
LINKS_BESIDES = 4


@dataclass
class Life:
    """One process of a worker; ``killed_s`` is when we killed it or asked it to go."""

    name: str
    process: psutil.Process
    began_s: float
    killed_s: float | None = None
    most_links: int = 0
    samples: list[tuple[float, float, float, float]] = field(default_factory=list)
    ports: set[int] = field(default_factory=set)

    @property
    def is_live(self) -> bool:
        return self.killed_s is None and runs(self.process.pid)

    def sample(self, now_s: float) -> None:
        """Note memory in MB, descriptors, links and threads."""
        with suppress(psutil.Error):
            memory = self.process.memory_info().rss / 2**20
            connections = self.process.net_connections(kind="tcp")
            num_links = sum(each.status != psutil.CONN_LISTEN for each in connections)
            descriptors = self.process.num_fds() - num_links
            self.most_links = max(self.most_links, num_links)
            sample = memory, float(descriptors), float(self.process.num_threads())
            self.samples.append(((now_s - self.began_s) / 60, *sample))

    def trends(self) -> dict[str, tuple[float, float]]:
        """Return the slope of each measure a minute, and its error; none of too short a life.

        A line goes through the means of stretches: neighbouring samples resemble each other, so the
        error of a line through all of them would be too small.
        """
        if not self.samples or self.samples[-1][0] < WARM_UP_MINUTES + JUDGED_MINUTES:
            return {}
        stretches: dict[int, list[tuple[float, ...]]] = {}
        for sample in self.samples:
            if sample[0] >= WARM_UP_MINUTES:
                stretches.setdefault(int(sample[0] / STRETCH_MINUTES), []).append(sample)
        minutes, *series = np.array([np.mean(each, axis=0) for each in stretches.values()]).T
        found = {}
        for name, values in zip(MEASURES, series, strict=True):
            (slope, _), covariance = np.polyfit(minutes, values, 1, cov=True)
            found[name] = float(slope), math.sqrt(covariance[0, 0])
        return found


def life_of(path: Path) -> tuple[int, int]:
    """Return rank and process of a worker's life, by the name of its file."""
    rank, pid = path.name.split("-")[1:3]
    return int(rank), int(pid)


class Soak:
    """One run, what befalls it, and what is seen of it."""

    def __init__(self, directory: Path, num_workers: int, minutes: float, seed: int) -> None:
        self.directory, self.num_workers = directory, num_workers
        self.duration_s = 60 * minutes
        # In a run of less than 12 minutes all happens sooner.
        self.join_for_s = min(240.0, self.duration_s / 3)
        self.random = Random(seed)
        self.counts = dict.fromkeys(("cuts", "kills", "joins", "leaves", "averages"), 0)
        self.problems: list[str] = []
        self.lives: dict[tuple[int, int], Life] = {}
        self.seen: set[int] = set()
        self.files, self.temporary = directory / "files", directory / "tmp"
        for each in (self.files, self.temporary):
            each.mkdir(parents=True)
        self.secret = directory / "secret"
        self.secret.write_text(secrets.token_hex(16))
        self.secret.chmod(0o600)
        words = ["-n", str(num_workers), "--max-restarts", "100000"]
        self.run = self._start("run", *words, "--faults", STOPS, "--faults-seed", str(seed))
        self.supervisor = Life("supervisor", psutil.Process(self.run.process.pid), time.monotonic())
        self.joiner: RunCommand | None = None
        self._joins_s = self._leaves_s = 0.0
        self._victim: int | None = None
        self._is_over = threading.Event()
        self._cutter = threading.Thread(target=self._cut_links, args=(Random(seed),))

    def _start(self, name: str, *words: str) -> RunCommand:
        variables = {"TMPDIR": f"{self.temporary}", "OMP_NUM_THREADS": "1"}
        variables = VARIABLES | variables | {"PYTHONWARNINGS": "default"}
        options = ["--secret-file", str(self.secret), "--log-dir", str(self.directory / "log")]
        command = [*words, *options, str(WORKER), str(self.files)]
        return RunCommand(self.directory / f"{name}.output", command, environment=variables)

    # What is seen.

    def look(self) -> None:
        """Note new lives, and that the supervisors run."""
        now_s = time.monotonic()
        for path in self.files.glob("life-*"):
            rank, pid = key = life_of(path)
            if key not in self.lives and runs(pid):
                life = self.lives[key] = Life(f"worker {rank}", psutil.Process(pid), now_s)
                with suppress(psutil.Error):
                    connections = life.process.net_connections(kind="tcp")
                    listening = [each for each in connections if each.status == "LISTEN"]
                    life.ports = {each.laddr.port for each in listening}
        for command in self.commands:
            if command.process.poll() is not None and not (self.files / "end").exists():
                raise RuntimeError(f"the run ended early:\n{command.output.read_text()[-4000:]}")

    @property
    def commands(self) -> list[RunCommand]:
        """All supervisors that have not been asked to leave."""
        return [self.run] if self.joiner is None else [self.run, self.joiner]

    def live(self) -> dict[int, Life]:
        return {rank: life for (rank, _), life in self.lives.items() if life.is_live}

    def are_all_back(self) -> bool:
        """Return whether all of the run and, if one is to be there, the one that joined train."""
        live = self.live()
        num_joined = sum(rank >= self.num_workers for rank in live)
        return set(range(self.num_workers)) <= live.keys() and num_joined == len(self.commands) - 1

    def sample(self) -> None:
        """Take one sample of everyone, and note what processes there are."""
        now_s = time.monotonic()
        for life in (self.supervisor, *self.live().values()):
            life.sample(now_s)
        for command in self.commands:
            with suppress(psutil.Error):
                own = psutil.Process(command.process.pid)
                self.seen |= {each.pid for each in (own, *own.children(recursive=True))}

    # What befalls it.

    def _cut_links(self, random: Random) -> None:
        """Cut a link of the run every CUT_EVERY_S until all is over."""
        while not self._is_over.wait(CUT_EVERY_S):
            with suppress(psutil.Error):  # the run has ended
                children = [each.pid for each in self.supervisor.process.children()]
                link = drawn_link(children, random)
                self.counts["cuts"] += link is not None and cut(*link)

    def kill(self) -> bool:
        """Kill a worker of odd rank; False: the one that was killed last is not back."""
        live = self.live()
        if not set(range(self.num_workers)) <= live.keys():
            return False
        odd = [rank for rank in range(1, self.num_workers, 2) if rank != self._victim]
        self._victim = self.random.choice(odd or [1])
        life = live[self._victim]
        life.killed_s = time.monotonic()
        os.kill(life.process.pid, signal.SIGKILL)
        self.counts["kills"] += 1
        return True

    def average(self) -> None:
        """Ask a worker that is never killed for an average."""
        even = range(0, self.num_workers, 2)
        (self.files / f"asked-{even[self.counts['averages'] % len(even)]}").touch()
        self.counts["averages"] += 1

    def join_or_leave(self, now_s: float, last_s: float) -> None:
        """Let one join, or after a while leave again; the last one stays."""
        pause_s = self.join_for_s / 8
        if self.joiner is None and now_s >= self._joins_s and 0 in self.live():
            (port,) = self.live()[0].ports
            self.counts["joins"] += 1
            self.joiner = self._start(f"join-{self.counts['joins']}", "--join", f"127.0.0.1:{port}")
            self._leaves_s = now_s + self.join_for_s
        elif self.joiner is not None and self._leaves_s <= now_s < last_s - self.join_for_s:
            here = [life for rank, life in self.live().items() if rank >= self.num_workers]
            if not here:
                return
            here[0].killed_s = time.monotonic()
            joiner, self.joiner = self.joiner, None
            joiner.process.send_signal(signal.SIGTERM)
            if joiner.process.wait(60) != 128 + signal.SIGTERM:
                self.problems.append(f"one that was to leave ended with {joiner.process.poll()}")
            self.counts["leaves"] += 1
            self._joins_s = now_s + pause_s

    def train(self, view: ProgressView) -> None:
        """Wait until all train, and let everything happen for the time of the run."""
        self.run.wait_for(lambda: (self.look(), self.are_all_back())[1])
        self._cutter.start()
        began_s = time.monotonic()
        ends_s = began_s + self.duration_s
        self._joins_s = began_s + self.join_for_s / 8
        every = {
            self.sample: min(SAMPLE_EVERY_S, self.duration_s / 60),
            self.kill: min(45.0, self.duration_s / 4),
            self.average: min(60.0, self.duration_s / 4),
        }
        due = {what: began_s + period_s for what, period_s in every.items()}
        while (now_s := time.monotonic()) < ends_s:
            self.look()
            for what, at_s in due.items():
                if now_s >= at_s:
                    again_s = AGAIN_S if what() is False else every[what]
                    due[what] = max(at_s + again_s, time.monotonic())
            self.join_or_leave(now_s, ends_s)
            counts = ", ".join(f"{number} {name}" for name, number in self.counts.items())
            view.advance((now_s - began_s) / self.duration_s, counts)
            time.sleep(0.1)

    def end(self) -> dict[int, dict[str, Any]]:
        """Let all who are to be there come back, and end; return what they told."""
        self.run.wait_for(lambda: (self.look(), self.are_all_back())[1])
        self.run.wait_for(lambda: not list(self.files.glob("asked-*")))
        (self.files / "unfinished-end").write_text(str(len(self.live())))
        (self.files / "unfinished-end").replace(self.files / "end")
        for command in self.commands:
            code = command.process.wait(PATIENCE_S)
            if code:
                last = command.output.read_text()[-4000:]
                self.problems.append(f"{command.output.name} ended with {code}:\n{last}")
        paths = self.files.glob("ended-*.json")
        return {int(path.stem.split("-")[1]): json.loads(path.read_text()) for path in paths}

    def stop(self) -> None:
        self._is_over.set()
        for command in self.commands:
            command.stop()

    # What came of it.

    def judge(self, ends: dict[int, dict[str, Any]]) -> None:
        self._judge_values(ends)
        self._judge_what_is_left(ends)
        self._judge_output()
        expected = self.duration_s / CUT_EVERY_S
        if self.counts["cuts"] < expected / 2:
            self.problems.append(f"of {expected:.0f} cuts {self.counts['cuts']} were done")
        trends = [(life, life.trends()) for life in (self.supervisor, *self.lives.values())]
        if not any(found for _, found in trends):
            least = WARM_UP_MINUTES + JUDGED_MINUTES
            self.problems.append(f"no life lasted {least:g} minutes, so none could be judged flat")
        most = self.num_workers + LINKS_BESIDES
        self.problems += [
            f"{life.name}, process {life.process.pid}, had {life.most_links} links"
            for life in self.lives.values()
            if life.most_links > most
        ]
        self.problems += [
            f"{name} of {life.name}, process {life.process.pid}, grows by {slope:.2f} ± "
            f"{error:.2f} {MEASURES[name][0]} a minute, more than {MEASURES[name][1]:g}"
            for life, found in trends
            for name, (slope, error) in found.items()
            if not slope - 2.0 * error <= MEASURES[name][1]
        ]

    def _judge_values(self, ends: dict[int, dict[str, Any]]) -> None:
        brought = [torch.load(path) for path in self.files.glob("brought-*.pt")]
        averages = {rank: torch.load(self.files / f"average-{rank}.pt") for rank in ends}
        told = {json.dumps(end["consolidated"], sort_keys=True) for end in ends.values()}
        if len(told) != 1 or len(brought) != len(ends):
            self.problems.append(f"{len(brought)} made an average, and {len(ends)} tell: {told}")
            return
        first = averages[min(averages)]
        self.problems += [
            f"worker {rank} holds other bits than {min(averages)}"
            for rank, average in averages.items()
            if not torch.equal(average, first)
        ]
        try:
            assert_is_mean(first, brought)
        except AssertionError as error:
            self.problems.append(f"the average is not the mean: {error}")
        end = json.loads(told.pop())
        if end["world_size"] != len(ends):
            self.problems.append(f"an average of {end['world_size']} workers, not {len(ends)}")
        steps = {int(rank): n for rank, n in end["gradient_steps_by_rank"].items()}
        self._judge_steps(steps)
        total = sum(steps.values())
        if end["samples"] != total * BATCH or end["gradient_steps"] != total:
            self.problems.append(f"{end['samples']} samples of {total} steps")

    def _judge_steps(self, told: dict[int, int]) -> None:
        """Hold the steps of each rank against the diaries of its lives."""
        diaries = self.diaries()
        for rank in told.keys() | diaries:
            lives = diaries.get(rank, [(0, 0)])
            least, most = (sum(each) for each in zip(*lives, strict=True))
            if not least <= told.get(rank, 0) <= most:
                line = f"{told.get(rank, 0)} steps of worker {rank}, not {least} to {most}"
                self.problems.append(line)

    def diaries(self) -> dict[int, list[tuple[int, int]]]:
        """Return of each rank's lives the fewest and the most steps that others may know."""
        found: dict[int, list[tuple[int, int]]] = {}
        for path in self.files.glob("diary-*"):
            key = life_of(path)
            times = [float(line) for line in path.read_text().splitlines()]
            life = self.lives.get(key)
            killed_s = life.killed_s if life else None
            known = [time_s for time_s in times if killed_s is None or time_s < killed_s - UNTOLD_S]
            found.setdefault(key[0], []).append((len(known), len(times)))
        return found

    def _judge_what_is_left(self, ends: dict[int, dict[str, Any]]) -> None:
        self.problems += [
            f"{what} of worker {rank} are left: {left}"
            for rank, end in ends.items()
            for what in ("threads", "descriptors")
            if (left := end[f"{what}_left"])
        ]
        if processes := [pid for pid in self.seen if runs(pid)]:
            self.problems.append(f"processes are left: {processes}")
        own = [f"{pid}" for _, pid in self.lives]
        shared = [path.name for path in Path("/dev/shm").iterdir()]
        files = [name for name in shared if set(own) & set(name.split("_"))]
        # torch leaves a directory of its compiler, and a loader that is killed one of Python's.
        others = ("torchinductor_", "pymp-")
        temporary = [path for path in self.temporary.iterdir() if not path.name.startswith(others)]
        files += [str(path) for path in temporary]
        files += [str(path) for path in (self.files / "checkpoints").rglob("*.tmp*")]
        if files:
            self.problems.append(f"files are left: {files}")
        made = len(list(self.files.glob("averaged-*")))
        if made != self.counts["averages"]:
            self.problems.append(f"of {self.counts['averages']} averages {made} were made")

    def _judge_output(self) -> None:
        """Nobody said anything of an error, but that a worker was killed."""
        for path in sorted(self.directory.glob("*.output")):
            if bad := errors_in(path.read_text().splitlines()):
                self.problems.append(f"{path.name}: {len(bad)} errors, the first: {bad[0]}")


def errors_in(lines: list[str]) -> list[str]:
    """Return the lines of a run's output that report an error.

    One error is not the run's: Python's own ``resource_sharer`` raises and prints it if a data
    loader's process is killed while it hands a descriptor over.
    """
    found, is_of_sharer = [], False
    for line in lines:
        is_of_sharer &= "Traceback (most recent call last)" not in line
        is_of_sharer |= "multiprocessing/resource_sharer.py" in line
        if ("Error" in line or "Too many open files" in line) and not is_of_sharer:
            found.append(line)
        is_of_sharer &= "Error" not in line
    return found


def results_of(soak: Soak, arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    return {
        "command": command_of(arguments),
        "version": gossipdp.__version__,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}",
        "small_shared_memory": arguments.has_own_shm,
        "seconds": round(seconds, 1),
        "counts": soak.counts,
        "lives": [
            {
                "name": life.name,
                "minutes": life.samples[-1][0] if life.samples else 0.0,
                "was_killed": life.killed_s is not None,
                "most_links": life.most_links,
                "slopes_and_errors_a_minute": life.trends(),
            }
            for life in (soak.supervisor, *soak.lives.values())
        ],
        "problems": soak.problems,
    }


def command_of(arguments: argparse.Namespace) -> str:
    words = ["python", SCRIPT, "--minutes", f"{arguments.minutes:g}"]
    words += ["--workers", str(arguments.workers), "--seed", str(arguments.seed)]
    return shlex.join(words)


def with_small_shared_memory(words: list[str]) -> None:
    """Become the same command in a mount namespace of its own, with a /dev/shm of 64 MB."""
    mount = f'mount -t tmpfs -o {SHM} tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh"]
    os.execvp(command[0], [*command, sys.executable, *words, "--has-own-shm"])


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="of training")
    parser.add_argument("--workers", type=int, default=8, help="of the run; one more joins")
    parser.add_argument("--seed", type=int, help="of what happens; default: drawn")
    parser.add_argument("--results", type=Path, default=Path("runs/soak.json"), help="JSON file")
    parser.add_argument("--has-own-shm", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.workers < 2:
        parser.error(f"--workers {arguments.workers}: at least 2, of which one may be killed")
    if arguments.seed is None:
        arguments.seed = secrets.randbelow(10**9)
    return arguments


def main() -> int:
    arguments = _parsed()
    console = Console(soft_wrap=True)
    if not arguments.has_own_shm:
        if os.geteuid() == 0 and shutil.which("unshare"):
            sys.stdout.flush()
            seed = ["--seed", str(arguments.seed)] if "--seed" not in sys.argv else []
            with_small_shared_memory([*sys.argv, *seed])
        console.print("not root, or no unshare: the /dev/shm of 64 MB is left out")
    print(f"to run it again: {command_of(arguments)}", flush=True)
    directory = Path("runs/soak").absolute()
    shutil.rmtree(directory, ignore_errors=True)
    began_s = time.monotonic()
    soak = Soak(directory, arguments.workers, arguments.minutes, arguments.seed)
    try:
        with ProgressView("soaking", console=console, redraw_every_s=1, line_every_s=10) as view:
            soak.train(view)
        ends = soak.end()
    finally:
        soak.stop()
    soak.judge(ends)
    results = results_of(soak, arguments, time.monotonic() - began_s)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps(results, indent=1) + "\n")
    counts = ", ".join(f"{number} {name}" for name, number in soak.counts.items())
    print(f"{arguments.minutes:g} minutes: {counts}; {len(soak.problems)} problems")
    print(f"written to {arguments.results}; files of the run in {directory}")
    for problem in soak.problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
