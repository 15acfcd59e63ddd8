"""A worker of startup.py, which trains until worker 0, killed and started again, has exchanged.

    gossipdp run -n 4 --max-restarts 1 benchmarks/support/startup_worker.py PATH SPARE_S

Worker 0 kills itself SPARE_S after its first exchange; its next process writes the seconds from
then to its own first exchange to PATH. The others write those until they noticed it. Nothing is
imported here that a plain script would not import.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

STEP_S, PATIENCE_S = 0.02, 60.0


def main() -> None:
    import torch

    from gossipdp import GossipDataParallel
    from gossipdp.links.clock import since_boot_s

    path, spare_s = Path(sys.argv[1]), float(sys.argv[2])
    net = torch.nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.AdamW(net.parameters())
    model = GossipDataParallel(net, optimizer, budget_samples=1)
    model(torch.zeros(1, 8)).sum().backward()
    optimizer.step()

    def until(is_true: Callable[[], bool]) -> None:
        """Train on, a step every 20 ms."""
        ends_s = time.monotonic() + PATIENCE_S
        while not is_true():
            if time.monotonic() > ends_s:
                raise TimeoutError(f"no exchange within {PATIENCE_S:g} s")
            time.sleep(STEP_S)
            optimizer.step()

    death = path.with_suffix(".death")
    if os.environ["RANK"] != "0":
        until(path.exists)
        noticed_s = model.stats().noticed[0].at_s - float(death.read_text("utf-8"))
        path.with_suffix(f".noticed{os.environ['RANK']}").write_text(str(noticed_s), "utf-8")
    else:
        until(lambda: model.stats().exchanges > 0)
        exchanged_s = since_boot_s()
        if not death.exists():
            until(lambda: since_boot_s() > exchanged_s + spare_s)  # a spare gets ready
            death.write_text(str(since_boot_s()), "utf-8")
            os.kill(os.getpid(), signal.SIGKILL)
        written = path.with_suffix(".new")
        written.write_text(str(exchanged_s - float(death.read_text("utf-8"))), "utf-8")
        written.rename(path)
    model.consolidate()


if __name__ == "__main__":
    main()
