"""A fresh interpreter of startup.py: CPU and wall time at each stage of a script's start.

    python benchmarks/startup_worker.py PATH CASE NUM_VALUES

Worker 0 writes its stages to PATH. Nothing is imported here that a plain script would not import.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

IMPORT, WRAP = "import gossipdp", "wrap"


def main() -> None:
    path, case, num_values = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    began_s = time.perf_counter()
    stages: dict[str, tuple[float, float]] = {}

    def note(stage: str) -> None:
        stages[stage] = time.process_time(), time.perf_counter() - began_s

    import torch

    net = torch.nn.Linear(num_values // 8, 8, bias=False)
    optimizer = torch.optim.AdamW(net.parameters())
    note("torch")
    model = net
    if case in (IMPORT, WRAP):
        from gossipdp import GossipDataParallel
    note("imported")
    if case == WRAP:
        model = GossipDataParallel(net, optimizer, budget_samples=1)
    note("wrapped")
    model(torch.zeros(1, num_values // 8)).sum().backward()
    optimizer.step()
    note("stepped")
    if case == WRAP:
        model.consolidate()
    if os.environ.get("RANK", "0") == "0":
        path.write_text(json.dumps(stages), "utf-8")


if __name__ == "__main__":
    main()
