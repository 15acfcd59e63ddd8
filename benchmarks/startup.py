"""How soon a death is noticed, how soon its worker is back, and what its spare takes.

    python benchmarks/startup.py [--rounds 7]      writes benchmarks/results/startup.{json,md}

Four workers of `gossipdp run` train; one is killed (SIGKILL) once it has a spare interpreter, and
is timed until its next process has exchanged. Python's compiled files (``__pycache__``) are there,
as after ``pip install``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import psutil
from support.report import Report, Spread, Table, asked, run_script

from gossipdp.launcher.local import Spares

WORKER = str(Path(__file__).with_name("support") / "startup_worker.py")


def measure_kill(num_workers: int = 4, spare_s: float = 15.0) -> tuple[float, list[float]]:
    """Return the seconds from a kill until an exchange, and until each other worker noticed.

    spare_s: for the spare's imports before.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    launcher = ["-m", "gossipdp", "run", "-n", str(num_workers), "--max-restarts", "1"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seconds"
        command = [sys.executable, *launcher, WORKER, str(path), str(spare_s)]
        subprocess.run(command, env=environment, check=True, timeout=300)
        noticed = [float(each.read_text("utf-8")) for each in path.parent.glob("*.noticed*")]
        return float(path.read_text("utf-8")), noticed


def measure_spare() -> float:
    """Return the MB that a spare interpreter holds for itself."""
    with closing(Spares([WORKER], os.environ, 1)) as spares:
        spares.prepare()
        (child,) = psutil.Process().children()
        taken_s, before_s = 0.0, -1.0
        while taken_s == 0.0 or taken_s != before_s:  # until it waits
            before_s = taken_s
            time.sleep(1.0)
            taken_s = sum(child.cpu_times()[:2])
        lines = Path(f"/proc/{child.pid}/smaps_rollup").read_text("utf-8").splitlines()
        (written_kb,) = (int(line.split()[1]) for line in lines if "Private_Dirty" in line)
        return written_kb * 1024 / 1e6


def main() -> None:
    quick, rounds = asked(__doc__, rounds=7)
    report = Report("startup", "The start of a killed worker", quick)
    measure_kill()  # compiles what is kept on disk, and is not counted
    kills = [measure_kill() for _ in range(rounds)]
    back_s = Spread.of(back for back, _ in kills)
    noticed_s = Spread.of(each for _, noticed in kills for each in noticed)
    own_mb = Spread.of(measure_spare() for _ in range(rounds))
    report.tables.append(
        Table(
            "A killed worker of four, and its spare interpreter",
            (
                "s from the kill until another noticed",
                "until it exchanges again",
                "MB of the spare's own",
            ),
            [(noticed_s.text(".3f"), back_s.text(), own_mb.text(".0f"))],
            f"Medians of {rounds} (least to greatest). Steps take 20 ms. There is one spare for "
            "each gossipdp run with --max-restarts. Its own is what it has written; files such as "
            "torch's libraries are in memory once for all processes.",
        )
    )
    report.write({"back_s": back_s, "noticed_s": noticed_s, "spare_mb": own_mb})


if __name__ == "__main__":
    run_script(main)
