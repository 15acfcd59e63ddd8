"""A fresh interpreter of startup.py: CPU and wall time at each stage of a script's start.

    python benchmarks/support/startup_worker.py PATH CASE SPARE_S

Worker 0 writes its stages to PATH. Nothing is imported here that a plain script would not import.
KILLED: worker 0 kills itself SPARE_S after it has exchanged; the stages are its next process's.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

WRAP, EXCHANGE, KILLED = "wrap", "exchange", "killed"
STEP_S, PATIENCE_S = 0.02, 60.0


def main() -> None:
    path, case = Path(sys.argv[1]), sys.argv[2]
    began_s = time.perf_counter()
    stages: dict[str, tuple[float, float]] = {}

    def note(stage: str) -> None:
        stages[stage] = time.process_time(), time.perf_counter() - began_s

    import torch

    net = torch.nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.AdamW(net.parameters())
    note("torch")
    from gossipdp import GossipDataParallel

    model = GossipDataParallel(net, optimizer, budget_samples=1)
    note("wrapped")
    model(torch.zeros(1, 8)).sum().backward()
    optimizer.step()
    is_measured = os.environ.get("RANK", "0") == "0"
    if case in (EXCHANGE, KILLED):

        def until(is_true: Callable[[], bool]) -> None:
            """Train on, a step every 20 ms."""
            ends_s = time.perf_counter() + PATIENCE_S
            while not is_true():
                if time.perf_counter() > ends_s:
                    raise TimeoutError(f"no exchange within {PATIENCE_S:g} s")
                time.sleep(STEP_S)
                optimizer.step()

        if not is_measured:
            until(path.exists)
        else:
            until(lambda: model.stats().exchanges > 0)
            note("exchanged")
            death = path.with_suffix(".death")
            if case == KILLED and not death.exists():
                spare_s = time.monotonic() + float(sys.argv[3])
                until(lambda: time.monotonic() > spare_s)  # a spare interpreter gets ready
                death.write_text(str(time.monotonic()), "utf-8")
                os.kill(os.getpid(), signal.SIGKILL)
            if case == KILLED:
                stages["since the kill"] = 0.0, time.monotonic() - float(death.read_text("utf-8"))
    if is_measured:
        written = path.with_suffix(".new")
        written.write_text(json.dumps(stages), "utf-8")
        written.rename(path)
    model.consolidate()


if __name__ == "__main__":
    main()
