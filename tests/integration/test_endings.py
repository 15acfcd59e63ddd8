"""The endings of a run, as ``docs/faults.md`` lists them, each by real processes.

A row of that table is a function here. It lets the thing happen, and asserts what is kept. Then all
lines that were printed must be among those that the row quotes, and each of those must be there.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from run_processes import VARIABLES, RunCommand, wait_until_gone
from waiting import LONGEST_S

from gossipdp.parallel.checkpoint import Facts, saved_by
from gossipdp.parallel.checkpoint_files import _average_of

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
OF_ANY_RUN = ("starting ...; importing torch takes some seconds", "to add a worker: ...")
SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch
from gossipdp import Checkpoints, GossipDataParallel, Network, PeerLostError

files, words = Path(sys.argv[1]), sys.argv[2:]
resume = "auto" if "resume" in words else None
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
network = Network(timeout_s=1.0, shared_memory="off" if "cut" in words else "auto")
saving = Checkpoints(files / "saved", every_steps=5, resume=resume)
model = GossipDataParallel(net, optimizer, network=network, checkpoints=saving)
own = str(model.rank)
(files / f"began-{own}-{time.monotonic()}-{os.getpid()}").touch()
try:
    while not any((files / name).exists() for name in ("end", "end-" + own)):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.01)
        while (files / ("hold-" + own)).exists():
            (files / ("holds-" + own)).touch()
            time.sleep(0.01)
        if (files / "fill").exists():
            with open(files / "saved" / ("fill-" + own), "ab", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    pass
except KeyboardInterrupt:
    (files / ("tidied-" + own)).touch()
    raise
except PeerLostError:
    model.save_averaged(files / "model.pt")  # raises it again
result = model.consolidate()
model.save_averaged(files / "model.pt")
(files / ("ended-" + own)).write_text(json.dumps([result.world_size, result.samples]))
"""


class Place:
    """A row's directory, and what its runs of the script leave there."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.files = directory, directory / "files"
        self.saved, self.model = self.files / "saved", self.files / "model.pt"
        self.started: list[RunCommand] = []
        self.saved.mkdir(parents=True)
        (directory / "train.py").write_text(SCRIPT)

    def start(
        self, *options: str, words: str = "", within: Sequence[str] = (), **variables: str
    ) -> RunCommand:
        run = RunCommand(
            self.directory / f"output-{len(self.started)}",
            [*options, str(self.directory / "train.py"), str(self.files), *words.split()],
            environment=VARIABLES | variables,
            within=within,
        )
        self.started.append(run)
        return run

    def start_two(self, *options: str, **how: Any) -> RunCommand:
        """Start a run of two workers, and wait until each has saved a checkpoint."""
        run = self.start("-n", "2", *options, **how)
        self.wait_until_saved(run)
        return run

    def wait_until_saved(self, run: RunCommand, life: int = 1) -> None:
        """Wait until both workers, or that life of theirs, have saved a checkpoint."""
        run.wait_for(lambda: all(len(self.lives(rank)) == life for rank in (0, 1)))
        before = [self.steps(rank) for rank in (0, 1)]
        run.wait_for(lambda: all(self.steps(rank) != before[rank] for rank in (0, 1)))

    def lives(self, rank: int) -> list[int]:
        """Return the processes that this worker has had."""
        began = [path.name.split("-") for path in self.files.glob(f"began-{rank}-*")]
        return [int(pid) for _, _, _, pid in sorted(began, key=lambda each: float(each[2]))]

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.lives(rank)[-1], number)

    def touch(self, *names: str) -> None:
        for name in names:
            (self.files / name).touch()

    def has(self, *names: str) -> bool:
        return all((self.files / name).exists() for name in names)

    def facts(self, rank: int) -> list[Facts]:
        """Return those of a worker's checkpoints, the newest first."""
        return [each.facts for each in saved_by(self.saved, rank)]

    def steps(self, rank: int) -> list[int]:
        return [facts.step for facts in self.facts(rank)]

    def assert_average_is_of(
        self, *ranks: int, path: Path | None = None, is_saved: bool = True
    ) -> None:
        """Compare it with what these workers, which made it, have said and saved last."""
        path = path or self.model
        saved, average = torch.load(path, weights_only=True), _average_of(path)
        assert average is not None
        assert average.is_end
        assert all(tensor.isfinite().all() for tensor in saved.values())
        for rank in ranks:
            ended = json.loads((self.files / f"ended-{rank}").read_text())
            assert ended == [len(ranks), average.samples]
            newest = saved_by(self.saved, rank)[0]
            if is_saved:
                held = safetensors.torch.load_file(newest.path)
                assert all(torch.equal(held[f"model/{name}"], saved[name]) for name in saved)
                assert average.samples == sum(entry.samples for entry in newest.facts.progress)
        assert average.samples >= sum(8 * self.steps(rank)[0] for rank in ranks)

    def end_all(self, run: RunCommand) -> RunCommand:
        """Let both workers end; both hold the average."""
        self.touch("end")
        run.process.wait(LONGEST_S)
        self.assert_average_is_of(0, 1)
        return run

    def stop_two(self, number: int) -> RunCommand:
        """Send the signal to the launcher; its line names the steps that are saved."""
        run = self.start_two()
        run.process.send_signal(number)
        run.process.wait(LONGEST_S)
        steps = sorted({self.steps(rank)[0] for rank in (0, 1)})
        named = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[1]}"
        said = run.output.read_text()
        assert f"stopped at {named}; " in said
        assert said.endswith(f" to go on from {self.saved}\n")
        assert not self.has("model.pt")
        return run


def namespace(kind: str, first: str, last: str = "true") -> list[str]:
    """Return the command that runs another in a namespace of its own, after and before these."""
    text = f'{first} && "$@"; code=$?; {last}; exit $code'
    return ["unshare", "--map-root-user", kind, "sh", "-c", text, "sh"]


ROWS: dict[str, Callable[[Place], RunCommand]] = {}


def row(function: Callable[[Place], RunCommand]) -> Callable[[Place], RunCommand]:
    """Add the function for the row of this name; it returns the run whose status the row has."""
    ROWS[function.__name__] = function
    return function


@row
def a_worker_is_killed_with_max_restarts(place: Place) -> RunCommand:
    run = place.start_two("--max-restarts", "1")
    place.signal(signal.SIGKILL, 1)
    run.wait_for(lambda: len(place.lives(1)) == 2 and place.facts(1)[0].incarnation == 1)
    newer, older = place.facts(1)[:2]
    assert newer.step > older.step
    return place.end_all(run)


@row
def a_worker_is_killed_without(place: Place) -> RunCommand:
    run = place.start_two()
    place.signal(signal.SIGKILL, 1)
    run.wait_for(lambda: "died" in run.output.read_text())
    steps = place.steps(1)
    place.touch("end")
    run.process.wait(LONGEST_S)
    place.assert_average_is_of(0)
    assert place.steps(1) == steps
    return run


@row
def all_workers_are_killed_with_max_restarts(place: Place) -> RunCommand:
    run = place.start_two("--max-restarts", "1", words="resume")
    place.signal(signal.SIGKILL, 0, 1)
    wait_until_gone([*place.lives(0), *place.lives(1)])
    step = place.steps(0)[0]
    place.wait_until_saved(run, life=2)
    assert f"goes on from step {step} of worker 0 in {place.saved}, " in run.output.read_text()
    return place.end_all(run)


@row
def all_workers_are_killed_without(place: Place) -> RunCommand:
    run = place.start_two(words="resume")
    place.signal(signal.SIGKILL, 0, 1)
    run.process.wait(LONGEST_S)
    files = [saved_by(place.saved, rank)[0].path for rank in (0, 1)]
    newest = max(files, key=lambda path: path.stat().st_mtime)
    assert f"all that they trained after {newest} is lost" in run.output.read_text()
    assert not place.has("model.pt")
    return run


@row
def a_worker_is_stopped_for_good(place: Place) -> RunCommand:
    run = place.start_two(GOSSIPDP_GRACE_S="1")
    place.signal(signal.SIGSTOP, 1)
    place.touch("end")
    run.wait_for(lambda: place.has("ended-0"))
    wait_until_gone(place.lives(0))
    run.process.send_signal(signal.SIGINT)
    run.process.wait(LONGEST_S)
    place.assert_average_is_of(0)
    assert place.steps(1)
    return run


@row
def a_stopped_worker_goes_on_after_the_end(place: Place) -> RunCommand:
    run = place.start_two()
    place.signal(signal.SIGSTOP, 1)
    place.touch("end-0")
    run.wait_for(lambda: place.has("ended-0"))
    digest = hashlib.sha256(place.model.read_bytes()).digest()
    place.signal(signal.SIGCONT, 1)
    run.process.wait(LONGEST_S)
    place.assert_average_is_of(0)
    assert hashlib.sha256(place.model.read_bytes()).digest() == digest
    assert list(place.files.glob("model*")) == [place.model]
    return run


@row
def the_network_is_cut_until_the_end(place: Place) -> RunCommand:
    within = namespace("--net", "ip link set lo up")
    run = place.start_two(words="cut", within=within, TORCH_CPP_LOG_LEVEL="ERROR")
    place.touch("hold-1")
    run.wait_for(lambda: place.has("holds-1"))
    into = ["nsenter", f"--target={run.process.pid}", "--user", "--net", "--preserve-credentials"]
    subprocess.run([*into, "ip", "link", "set", "lo", "down"], check=True)
    run.wait_for(lambda: place.steps(0)[0] > place.steps(1)[0] + 10)
    place.touch("end-0")
    run.wait_for(lambda: place.has("ended-0"))
    place.touch("end-1")
    (place.files / "hold-1").unlink()
    run.process.wait(LONGEST_S)
    place.assert_average_is_of(0)
    place.assert_average_is_of(1, path=place.files / "model-of-worker-1.pt")
    return run


@row
def the_disk_is_full(place: Place) -> RunCommand:
    saved, kept = place.saved, place.files / "copy"
    mount = f"mount -t tmpfs -o size=1m saves {saved}"
    run = place.start("-n", "2", within=namespace("--mount", mount, f"cp -r {saved} {kept}"))
    place.saved = Path(f"/proc/{run.process.pid}/root{saved}")
    place.wait_until_saved(run)
    place.touch("fill")
    run.wait_for(
        lambda: all(f"{rank}: a checkpoint could" in run.output.read_text() for rank in (0, 1))
    )
    steps = [place.steps(rank) for rank in (0, 1)]
    place.touch("end")
    run.process.wait(LONGEST_S)
    place.saved = kept
    assert [place.steps(rank) for rank in (0, 1)] == steps
    place.assert_average_is_of(0, 1, is_saved=False)
    return run


@row
def sigterm(place: Place) -> RunCommand:
    return place.stop_two(signal.SIGTERM)


@row
def ctrl_c(place: Place) -> RunCommand:
    run = place.stop_two(signal.SIGINT)
    assert place.has("tidied-0", "tidied-1")
    return run


@row
def gossipdp_run_is_killed(place: Place) -> RunCommand:
    run = place.start_two()
    place.touch("hold-0", "hold-1")
    run.wait_for(lambda: place.has("holds-0", "holds-1"))
    run.process.kill()
    run.process.wait()
    for rank in (0, 1):
        (place.files / f"hold-{rank}").unlink()
    wait_until_gone([*place.lives(0), *place.lives(1)])
    for rank in (0, 1):
        newest = saved_by(place.saved, rank)[0].path
        assert f"worker {rank} is stopped; saved {newest}\n" in run.output.read_text()
    return run


@row
def a_second_run_starts_in_the_same_directory(place: Place) -> RunCommand:
    first = place.start_two()
    for words in ("", "resume"):
        second = place.start("-n", "2", words=words)
        assert second.process.wait(LONGEST_S) == 1
        said = second.output.read_text()
        assert any(f"process {place.lives(rank)[0]} on" in said for rank in (0, 1))
    assert place.end_all(first).process.wait() == 0
    return second


@row
def a_worker_with_another_secret_joins(place: Place) -> RunCommand:
    secrets = [place.directory / name for name in ("secret", "other")]
    for secret in secrets:
        secret.write_text(f"{secret.name} of this test")
        secret.chmod(0o600)
    run = place.start_two("--secret-file", str(secrets[0]))
    run.wait_for(lambda: "--join" in run.output.read_text())
    address = run.output.read_text().partition("--join ")[2].split()[0]
    joiner = place.start("--join", address, "--secret-file", str(secrets[1]))
    joiner.process.wait(LONGEST_S)
    assert place.end_all(run).process.wait() == 0
    return joiner


def read_table() -> dict[str, tuple[list[str], int]]:
    """Return the sentences and the exit status of each row of the page."""
    section = PAGE.read_text().partition("\n## Endings\n")[2].partition("\n## ")[0]
    table = {}
    for line in re.findall(r"^\| (.+) \|$", section, re.MULTILINE)[1:]:
        name, _, printed, status = line.split(" | ")
        key = re.sub(r"\W+", "_", name.lower()).strip("_")
        table[key] = re.findall("`(.+?)`", printed), int(status)
    return table


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    for pid in place.lives(0) + place.lives(1):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for run in place.started:
        run.stop()


def test_each_row_of_the_page_has_a_test():
    assert read_table().keys() == ROWS.keys()


def is_quoted(line: str, sentence: str) -> bool:
    pattern = re.escape(sentence).replace(r"\.\.\.", ".*")
    return re.fullmatch(f"(gossipdp: )?{pattern}", line) is not None


@pytest.mark.parametrize("name", ROWS)
def test_the_ending(name, place):
    sentences, status = read_table()[name]
    code = ROWS[name](place).process.wait(LONGEST_S)
    wait_until_gone([*place.lives(0), *place.lives(1)])
    said = [line for run in place.started for line in run.output.read_text().splitlines() if line]
    strange = [x for x in said if not any(is_quoted(x, each) for each in (*OF_ANY_RUN, *sentences))]
    unsaid = [each for each in sentences if not any(is_quoted(line, each) for line in said)]
    assert not strange + unsaid, "\n".join([*said, f"not quoted: {strange}", f"unsaid: {unsaid}"])
    assert (code if code >= 0 else 128 - code) == status  # as a shell counts
