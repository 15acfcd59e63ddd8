"""The processes of one run of the race, and the hosts they are on."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from support.byte_task import num_parameters
from support.hosts import Hosts, run
from support.quality_rows import KINDS
from support.race_settings import RaceSettings, Shelf, Values, log_path, shelf_path
from support.rows import TORCHFT

from gossipdp.launcher.local import ScriptWorker, Spares
from gossipdp.launcher.processes import WorkerProcess
from gossipdp.launcher.spare_interpreter import PROGRAM

WORKER = Path(__file__).parents[1] / "race_worker.py"
PORT_ON_HOST = 29_400
COMMON_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "GOSSIPDP_LOG": os.environ.get("GOSSIPDP_LOG", "error"),
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "GLOO_SOCKET_IFNAME": "lo",
    "RUST_LOG": "error",  # of torchft
    "PYTHONUNBUFFERED": "1",
}


CGROUPS, PERIOD_US = Path("/sys/fs/cgroup"), 100_000


class Quota:
    """A control group whose processes get a share of one core, in turns of a tenth of a second.

    Raises:
        OSError: they cannot be made or limited here.
    """

    def __init__(self) -> None:
        self._is_first_version = (CGROUPS / "cpu").is_dir()
        self.path = CGROUPS / ("cpu" if self._is_first_version else "") / f"race{os.getpid()}"
        self._share = 0.0
        self.path.mkdir()
        try:
            self.set(1.0)
        except OSError:
            self.close()
            raise

    def set(self, share: float) -> None:
        if share != self._share:
            quota, self._share = str(round(share * PERIOD_US)), share
            if self._is_first_version:
                (self.path / "cpu.cfs_quota_us").write_text(quota)
            else:
                (self.path / "cpu.max").write_text(f"{quota} {PERIOD_US}")

    def close(self) -> None:
        """Remove the group, whose processes have ended."""
        with suppress(OSError):
            self.path.rmdir()


class HostWorker(ScriptWorker):
    """A worker on a host of its own, which vanishes when a fault kills the worker."""

    def __init__(self, variables: Mapping[str, str], vanish: Callable[[], None]) -> None:
        super().__init__([sys.executable, str(WORKER)], variables)
        self._vanish = vanish

    def send(self, number: int) -> None:
        if number == signal.SIGKILL:
            self._vanish()  # first, or the kernel would close its connections at their other ends
        super().send(number)

    def kill(self) -> None:
        self.kill_group()
        super().send(signal.SIGKILL)


class Fleet:
    """The processes of a run, by rank and life, and the hosts they are on."""

    def __init__(
        self, settings: RaceSettings, folder: Path, hosts: Hosts | None, started_s: float
    ) -> None:
        self._settings, self._folder, self._hosts = settings, folder, hosts
        self.pids: dict[int, int] = {}
        self.num_lives = [0] * settings.workers
        self.shelves: dict[tuple[int, int], Shelf] = {}
        run = {"RACE_DIR": str(folder), "RACE_STARTED": repr(started_s)}
        self._common = {**os.environ, **COMMON_VARIABLES, **run}
        # gossipdp's spares have imported gossipdp: those of torchft's rows have torchft.
        own = "import torchft; " if KINDS[settings.name.kind].needs is TORCHFT else ""
        self.spares = Spares(
            [str(WORKER)], self._common, number=settings.num_spares, program=own + PROGRAM
        )
        self.quota = Quota() if settings.quota_s else None
        self._cores = sorted(os.sched_getaffinity(0))
        # The last host is the launcher's; those between it and the first ones are spare.
        self._host_of = list(range(settings.workers))
        self._is_gone: set[int] = set()

    def start(self, variables: Mapping[str, str]) -> WorkerProcess:
        """Start a life of the worker whose rank the variables say."""
        rank = int(variables["RANK"])
        life, self.num_lives[rank] = self.num_lives[rank], self.num_lives[rank] + 1
        own = {**self._common, **variables}
        if self._hosts is not None:
            host = self._move(rank)
            own |= {"RACE_HOST": self._hosts.names[host]}
            own |= {"RACE_ADDRESS": self._hosts.addresses[host]}
            own |= self._hosts.variables(PORT_ON_HOST + self.num_lives[0], self._host_of[0])
            own.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # the launcher's cannot be reached
        if not self._settings.waits:
            own |= {"RACE_CORE": str(self._cores[rank % len(self._cores)])}
        if self.quota is not None and rank == self._settings.workers - 1:
            own |= {"RACE_GROUP": str(self.quota.path)}
        own |= {"RACE_LIFE": str(life), "RACE_BEGAN": repr(time.monotonic())}
        path = shelf_path(self._folder, rank, life)
        self.shelves[rank, life] = Shelf(path, num_parameters(self._settings.task))
        if self._settings.condition == "vanish":  # without a spare: the host would take it along
            worker: ScriptWorker = HostWorker(own, lambda: self._cut(rank))
        else:
            worker = self.spares.start(own)
        self.pids[rank] = worker.pid
        return worker

    def close(self) -> None:
        """End what is kept beside the workers, which have ended."""
        self.spares.close()
        if self.quota is not None:
            self.quota.close()

    def _move(self, rank: int) -> int:
        """Return the host of a worker: a spare one if its own has vanished."""
        if self._host_of[rank] in self._is_gone:
            assert self._hosts is not None
            used = {*self._host_of, *self._is_gone}
            self._host_of[rank] = min(set(range(len(self._hosts.names) - 1)) - used)
        return self._host_of[rank]

    def _cut(self, rank: int) -> None:
        assert self._hosts is not None
        host = self._host_of[rank]
        self._is_gone.add(host)
        run("ip", "-n", self._hosts.names[host], "link", "set", self._hosts.interface, "down")

    def shelf(self, rank: int) -> Shelf:
        """Return the shelf of a worker's present life."""
        return self.shelves[rank, self.num_lives[rank] - 1]

    def trains(self, rank: int) -> bool:
        """Return whether the present life of a worker has made a step."""
        return self.shelf(rank).is_made

    def live(self) -> list[int]:
        """Return the workers whose process exists."""
        return [rank for rank, pid in self.pids.items() if Path(f"/proc/{pid}").exists()]

    def held(self, ranks: Sequence[int]) -> list[tuple[dict[str, float], Values]]:
        """Return what the present lives of these workers have left."""
        found = [self.shelf(rank).look() for rank in ranks]
        return [each for each in found if each is not None]

    def log_tail(self) -> str:
        """Return the last lines of the first log that has any."""
        for rank, life in self.shelves:
            path = log_path(self._folder, rank, life)
            text = path.read_text("utf-8", errors="replace").strip() if path.exists() else ""
            if text:
                return "\n".join(text.splitlines()[-12:])
        return ""
