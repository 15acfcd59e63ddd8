"""The endings of a run, as the table in ``docs/faults.md`` has them, each by real processes.

The test of a row lets the thing happen, and asserts what is kept. Then each line that was printed
must be one that the row quotes, each quoted one must be there, and the status must be the row's.
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from run_processes import VARIABLES, RunCommand, wait_until_gone
from waiting import LONGEST_S

from gossipdp.parallel.checkpoint import file_path, saved_by, saved_steps
from gossipdp.parallel.checkpoint_files import _average_of

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
WAITS = "the run is complete; waiting for worker ... to end, unless Ctrl+C ends it"
OF_ANY_RUN = (
    *("starting ...; importing torch takes some seconds", "to add a worker: ...", WAITS),
    *("dialling rank ...: no handshake within 5 s", "dialling rank ...: Network is unreachable"),
)
SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch
from gossipdp import Checkpoints, GossipDataParallel, Network, PeerLostError

files, words = Path(sys.argv[1]), sys.argv[2:]
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
timeout_s = 1.0 if "brief" in words else 60.0  # so long that no death is noticed by it
network = Network(timeout_s=timeout_s, shared_memory="off" if "cut" in words else "auto")
resume = "auto" if "resume" in words else None
saving = Checkpoints(files / "saved", every_steps=5, resume=resume)
model = GossipDataParallel(net, optimizer, network=network, checkpoints=saving)

def mark(word):
    return files / f"{word}-{model.rank}"

with mark("began").open("a") as file:
    print(os.getpid(), file=file)
try:
    while not ((files / "end").exists() or mark("end").exists()):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.01)
        while mark("hold").exists():
            mark("holds").touch()
            time.sleep(0.01)
        if (files / "fill").exists():
            with open(files / "saved" / mark("fill").name, "ab", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    pass
except KeyboardInterrupt:
    mark("tidied").touch()
    raise
except PeerLostError:
    model.save_averaged(files / "model.pt")  # raises it again
result = model.consolidate()
model.save_averaged(files / "model.pt")
mark("ended").write_text(json.dumps([result.world_size, result.samples]))
"""


class Place:
    """A row's directory, and what its runs of the script leave there."""

    def __init__(self, directory: Path, row: str) -> None:
        self.row, self.directory, self.files = row, directory, directory / "files"
        self.saved, self.started = self.files / "saved", list[RunCommand]()
        self.saved.mkdir(parents=True)
        (directory / "train.py").write_text(SCRIPT)

    def start(
        self, *options: str, words: str = "", within: Sequence[str] = (), **variables: str
    ) -> RunCommand:
        output = self.directory / f"output-{len(self.started)}"
        command = [*options, str(self.directory / "train.py"), str(self.files), *words.split()]
        run = RunCommand(output, command, environment=VARIABLES | variables, within=within)
        self.started.append(run)
        return run

    def start_two(self, *options: str, **how: Any) -> RunCommand:
        """Start a run of two workers, and wait until each has saved a checkpoint."""
        run = self.start("-n", "2", *options, **how)
        self.wait_until_saved(run)
        return run

    def wait_until_saved(self, run: RunCommand, life: int = 1) -> None:
        """Wait until both workers have saved a checkpoint in that life of theirs."""
        run.wait_for(lambda: all(len(self.lives(rank)) == life for rank in (0, 1)))
        before = [self.steps(rank) for rank in (0, 1)]
        run.wait_for(lambda: all(self.steps(rank) != before[rank] for rank in (0, 1)))

    def lives(self, *ranks: int) -> list[int]:
        """Return the processes that these workers have had, a worker's last one last."""
        paths = [self.files / f"began-{rank}" for rank in ranks]
        texts = [path.read_text() for path in paths if path.exists()]
        return [int(pid) for text in texts for pid in text.split()]

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.lives(rank)[-1], number)

    def touch(self, *names: str) -> None:
        for name in names:
            (self.files / name).touch()

    def has(self, *names: str) -> bool:
        return all((self.files / name).exists() for name in names)

    def steps(self, rank: int) -> list[int]:
        """Return those of a worker's checkpoints, the newest first."""
        return saved_steps(self.saved, rank)

    def newest(self, rank: int) -> Path:
        return file_path(self.saved, rank, self.steps(rank)[0])

    def assert_average_is_of(
        self, *ranks: int, name: str = "model.pt", is_saved: bool = True
    ) -> None:
        """Compare it with what these workers, which made it, have said and saved last."""
        values = torch.load(self.files / name, weights_only=True)
        average = _average_of(self.files / name)
        assert average is not None
        assert average.is_end
        assert all(tensor.isfinite().all() for tensor in values.values())
        assert average.samples >= sum(8 * self.steps(rank)[0] for rank in ranks)
        for rank in ranks:
            ended = json.loads((self.files / f"ended-{rank}").read_text())
            assert ended == [len(ranks), average.samples]
            if is_saved:
                held = safetensors.torch.load_file(self.newest(rank))
                assert all(torch.equal(held[f"model/{key}"], values[key]) for key in values)
                newest = saved_by(self.saved, rank)[0]
                assert average.samples == sum(entry.samples for entry in newest.progress)

    def assert_ends(self, run: RunCommand) -> None:
        """Assert that this run ends with the row's status, and that all say what it quotes."""
        sentences, status = read_table()[self.row]
        code = run.process.wait(LONGEST_S)
        wait_until_gone(self.lives(0, 1))
        lines = [line for each in self.started for line in each.output.read_text().splitlines()]
        said = [line.removeprefix("gossipdp: ") for line in lines if line]
        quoted = [*OF_ANY_RUN, *sentences]
        if any("resume" in each.process.args for each in self.started):
            quoted.append("older checkpoints pull the newer ones back: ...")  # early in a run
        strange = [line for line in said if not any(is_of(line, each) for each in quoted)]
        unsaid = [each for each in sentences if not any(is_of(line, each) for line in said)]
        assert not strange + unsaid, "\n".join([*lines, f"not quoted: {strange}, unsaid: {unsaid}"])
        assert (code if code >= 0 else 128 - code) == status  # as a shell counts


def is_of(line: str, sentence: str) -> bool:
    return re.fullmatch(re.escape(sentence).replace(r"\.\.\.", ".*"), line) is not None


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
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    place = Place(tmp_path, request.node.name.removeprefix("test_"))
    yield place
    for pid in place.lives(0, 1):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for run in place.started:
        run.stop()


def test_each_row_of_the_page_has_a_test():
    assert all(f"test_{name}" in globals() for name in read_table())


def test_a_worker_is_killed_with_max_restarts(place):
    run = place.start_two("--max-restarts", "1")
    place.signal(signal.SIGKILL, 1)
    run.wait_for(lambda: len(place.lives(1)) == 2)
    older = place.steps(1)[0]
    run.wait_for(lambda: place.steps(1)[0] > older)  # its numbers go on from those of the other
    place.touch("end")
    place.assert_ends(run)
    place.assert_average_is_of(0, 1)


def test_a_worker_is_killed_without(place):
    run = place.start_two()
    place.signal(signal.SIGKILL, 1)
    run.wait_for(lambda: "died" in run.output.read_text())
    steps = place.steps(1)
    place.touch("end")
    place.assert_ends(run)
    place.assert_average_is_of(0)
    assert place.steps(1) == steps


def test_all_workers_are_killed_with_max_restarts(place):
    run = place.start_two("--max-restarts", "1", words="resume")
    place.signal(signal.SIGKILL, 0, 1)
    wait_until_gone(place.lives(0, 1))
    step = place.steps(0)[0]
    place.wait_until_saved(run, life=2)
    goes_on = f"goes on from step {step} of worker 0 in {place.saved}, "
    assert run.output.read_text().count(goes_on) == 1, "one worker says it for all"
    place.touch("end")
    place.assert_ends(run)
    place.assert_average_is_of(0, 1)


def test_all_workers_are_killed_without(place):
    run = place.start_two(words="resume")
    place.signal(signal.SIGKILL, 0, 1)
    place.assert_ends(run)
    times = {path: path.stat().st_mtime_ns for path in map(place.newest, (0, 1))}
    newest = [path for path, at in times.items() if at == max(times.values())]  # of one tick: both
    text = run.output.read_text()
    assert any(f"all that they trained after {path} is lost" in text for path in newest)
    assert not place.has("model.pt")


def test_a_worker_is_stopped_for_good(place):
    run = place.start_two(words="brief", GOSSIPDP_GRACE_S="1")
    place.signal(signal.SIGSTOP, 1)
    place.touch("end")
    run.wait_for(lambda: place.has("ended-0"))
    wait_until_gone(place.lives(0))
    run.wait_for(lambda: f"gossipdp: {WAITS.replace('...', '1')}\n" in run.output.read_text())
    run.process.send_signal(signal.SIGINT)
    place.assert_ends(run)
    place.assert_average_is_of(0)
    assert place.steps(1)


def test_a_stopped_worker_goes_on_after_the_end(place):
    run = place.start_two(words="brief")
    place.signal(signal.SIGSTOP, 1)
    place.touch("end-0")
    run.wait_for(lambda: place.has("ended-0"))
    model = place.files / "model.pt"
    content = model.read_bytes()
    place.signal(signal.SIGCONT, 1)
    place.assert_ends(run)
    place.assert_average_is_of(0)
    assert model.read_bytes() == content
    assert list(place.files.glob("model*")) == [model]


def namespace(kind: str, first: str, last: str = "true") -> list[str]:
    """Return the command that runs another in a namespace of its own, between these."""
    if subprocess.call(["sh", "-c", f"unshare --map-root-user {kind} sh -c '{first}'"]):
        pytest.skip("namespaces cannot be made here")
    text = f'{first} && "$@"; code=$?; {last}; exit $code'
    return ["unshare", "--map-root-user", kind, "sh", "-c", text, "sh"]


def test_the_network_is_cut_until_the_end(place):
    within = namespace("--net", "ip link set lo up")
    run = place.start_two(words="brief cut", within=within, TORCH_CPP_LOG_LEVEL="ERROR")
    place.touch("hold-1")
    run.wait_for(lambda: place.has("holds-1"))
    into = ["nsenter", f"--target={run.process.pid}", "--user", "--net", "--preserve-credentials"]
    subprocess.run([*into, "ip", "link", "set", "lo", "down"], check=True)
    run.wait_for(lambda: place.steps(0)[0] > place.steps(1)[0] + 10)
    place.touch("end-0")
    run.wait_for(lambda: place.has("ended-0"))
    place.touch("end-1")
    (place.files / "hold-1").unlink()
    place.assert_ends(run)
    place.assert_average_is_of(0)
    place.assert_average_is_of(1, name="model-of-worker-1.pt")


def test_the_disk_is_full(place):
    saved, kept = place.saved, place.files / "copy"
    mount = f"mount -t tmpfs -o size=1m saves {saved}"
    run = place.start("-n", "2", within=namespace("--mount", mount, f"cp -r {saved} {kept}"))
    place.saved = Path(f"/proc/{run.process.pid}/root{saved}")
    place.wait_until_saved(run)
    place.touch("fill")
    failed = [f"worker {rank}: a checkpoint could NOT be written" for rank in (0, 1)]
    run.wait_for(lambda: all(each in run.output.read_text() for each in failed))
    steps = [place.steps(rank) for rank in (0, 1)]
    place.touch("end")
    place.assert_ends(run)
    place.saved = kept
    assert [place.steps(rank) for rank in (0, 1)] == steps
    place.assert_average_is_of(0, 1, is_saved=False)


def assert_it_saves_and_says_where(place: Place, number: int) -> None:
    run = place.start_two()
    run.process.send_signal(number)
    place.assert_ends(run)
    steps = sorted({place.steps(rank)[0] for rank in (0, 1)})
    named = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[1]}"
    said = run.output.read_text()
    assert f"stopped at {named}; " in said
    assert said.endswith(f" to go on from {place.saved}\n")
    assert not place.has("model.pt")


def test_sigterm(place):
    assert_it_saves_and_says_where(place, signal.SIGTERM)


def test_ctrl_c(place):
    assert_it_saves_and_says_where(place, signal.SIGINT)
    assert place.has("tidied-0", "tidied-1")


def test_gossipdp_run_is_killed(place):
    run = place.start_two()
    place.touch("hold-0", "hold-1")
    run.wait_for(lambda: place.has("holds-0", "holds-1"))
    run.process.kill()
    run.process.wait()  # while its ends of pipes are open the workers may still report to it
    for rank in (0, 1):
        (place.files / f"hold-{rank}").unlink()
    place.assert_ends(run)
    for rank in (0, 1):
        line = f"worker {rank} is stopped; saved {place.newest(rank)}\n"
        assert line in run.output.read_text()


def test_a_second_run_starts_in_the_same_directory(place):
    first = place.start_two()
    for words in ("", "resume"):
        second = place.start("-n", "2", words=words)
        assert second.process.wait(LONGEST_S) == 1
        said = second.output.read_text()
        assert any(f"process {pid} on" in said for pid in place.lives(0, 1))
    place.touch("end")
    assert first.process.wait(LONGEST_S) == 0
    place.assert_ends(second)
    place.assert_average_is_of(0, 1)


def test_a_worker_with_another_secret_joins(place):
    secrets = [place.directory / name for name in ("secret", "other")]
    for secret in secrets:
        secret.write_text(f"{secret.name} of this test")
        secret.chmod(0o600)
    run = place.start_two("--secret-file", str(secrets[0]))
    run.wait_for(lambda: "--join" in run.output.read_text())
    address = run.output.read_text().partition("--join ")[2].split()[0]
    joiner = place.start("--join", address, "--secret-file", str(secrets[1]))
    joiner.process.wait(LONGEST_S)
    place.touch("end")
    assert run.process.wait(LONGEST_S) == 0
    place.assert_ends(joiner)
    place.assert_average_is_of(0, 1)
