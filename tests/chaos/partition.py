"""Two hosts, here network namespaces with a router between, that lose each other for a while."""

import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from run_processes import RunCommand

from gossipdp.links.clock import since_boot_s
from gossipdp.observe.log import CountsRecord, worker_file
from gossipdp_lab.demo.training import DIGEST, METRIC
from gossipdp_lab.report.run_log import LogReader, RunLog, WorkerLog
from support import hosts as hosts_of_benchmarks

pytestmark = pytest.mark.processes
ip = partial(hosts_of_benchmarks.run, "ip")

NUM_WORKERS = 6
HALVES = ({0, 1, 2}, {3, 4, 5})
TIMEOUT_S = 5.0
CUT_AT_S, CUT_FOR_S, LEAST_S = 2.0, 10.0, 27.0

SCRIPT = """
import sys
from pathlib import Path
from gossipdp_lab.demo import DemoArguments
from gossipdp_lab.demo.training import train_worker

arguments = DemoArguments(workers=6, samples=6400, output=Path(sys.argv[1]))
train_worker(arguments, float(sys.argv[2]), {})
"""


class RoutedHosts(hosts_of_benchmarks.Hosts):
    """Two network namespaces and a router that can be told to drop what goes between them."""

    def __init__(self) -> None:
        super().__init__(2)
        self.addresses = ["10.77.1.2", "10.77.2.2"]
        self.router = f"{self.mark}r"

    def connect(self) -> None:
        ip("netns", "add", self.router)
        ip("netns", "exec", self.router, "sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
        for name, address in zip(self.names, self.addresses, strict=True):
            gateway = address[:-1] + "1"
            ip("link", "add", f"{name}0", "type", "veth", "peer", "name", f"{name}1")
            ends = (f"{name}0", name, address), (f"{name}1", self.router, gateway)
            for link, place, own in ends:
                ip("link", "set", link, "netns", place)
                ip("-n", place, "address", "add", f"{own}/24", "dev", link)
                ip("-n", place, "link", "set", link, "up")
            ip("-n", name, "route", "add", "default", "via", gateway)

    def disconnect(self) -> None:
        subprocess.run(["ip", "netns", "del", self.router], check=False, capture_output=True)

    def change(self, verb: str) -> None:
        """Begin to drop everything, in silence, or end that."""
        for address in self.addresses:
            ip("-n", self.router, "route", verb, "blackhole", f"{address}/32")


@pytest.fixture
def hosts() -> Iterator[RoutedHosts]:
    if (why := hosts_of_benchmarks.missing()) is not None:
        pytest.skip(f"network namespaces cannot be had: {why}")
    with RoutedHosts() as hosts:
        yield hosts


@pytest.fixture
def runs(hosts: RoutedHosts, tmp_path: Path) -> Iterator[list[RunCommand]]:
    script, secret = tmp_path / "script.py", tmp_path / "secret"
    script.write_text(SCRIPT)
    secret.write_text("a secret of this test")
    secret.chmod(0o600)
    started = []
    for node, name in enumerate(hosts.names):
        words = ["-n", "3", "--nnodes", "2", "--node-rank", str(node)]
        words += ["--rendezvous", f"{hosts.addresses[0]}:29400", "--secret-file", str(secret)]
        words += [str(script), str(tmp_path / "run"), str(LEAST_S)]
        within = ["ip", "netns", "exec", name]
        started.append(RunCommand(tmp_path / f"output-{node}", words, within=within))
    yield started
    for run in started:
        run.stop()


def exchanges(log: WorkerLog, with_ranks: set[int], from_s: float, to_s: float) -> int:
    """Return the number with these workers, recorded between two times in seconds since 1970."""
    counts = [
        sum(record.exchanges_by_neighbour.get(rank, 0) for rank in with_ranks)
        for record in log.counts
        if from_s <= log.start.started_at + record.time_s < to_s
    ]
    return counts[-1] - counts[0] if counts else 0


@pytest.mark.timeout(300)
def test_both_halves_go_on_and_merge_when_the_partition_heals(hosts, runs, tmp_path):
    directory = tmp_path / "run"
    for rank in range(NUM_WORKERS):
        log = LogReader(worker_file(directory, rank))
        runs[0].wait_for(lambda log=log: CountsRecord in map(type, log.read_new()))
    time.sleep(CUT_AT_S)
    hosts.change("add")
    cut_s = time.time()
    time.sleep(CUT_FOR_S)
    healed_s, healed_at_s = time.time(), since_boot_s()
    hosts.change("del")
    for run in runs:
        assert run.process.wait(120) == 0, run.output.read_text()
    workers = RunLog.read(directory).workers
    assert [len(workers[rank].lives) for rank in range(NUM_WORKERS)] == [1] * len(workers)
    ends = [log.end for log in workers.values()]
    assert {end.num_averaged for end in ends if end} == {NUM_WORKERS}
    values = [log.last_values() for log in workers.values()]
    assert len({each[DIGEST] for each in values}) == 1
    assert all(each[METRIC] > 0.95 for each in values)
    for rank, log in workers.items():
        own, others = HALVES if rank in HALVES[0] else HALVES[::-1]
        # After that the news that one's own half is lost may come before its answer.
        notices = [notice for notice in log.noticed if notice.at_s < healed_at_s]
        assert {notice.rank for notice in notices if notice.kind == "lost"} == others, notices
        assert not [notice for notice in notices if notice.kind == "answered"]
        back = {notice.rank for notice in log.noticed if notice.kind == "answered"}
        assert back >= others, log.noticed
        # Once the others are known to be away, and until they are back.
        apart = (cut_s + TIMEOUT_S + 1, healed_s)
        assert exchanges(log, own, *apart) > 0
        assert exchanges(log, others, *apart) == 0
    across = sum(
        exchanges(log, HALVES[rank in HALVES[0]], healed_s, float("inf"))
        for rank, log in workers.items()
    )
    assert across > 0
