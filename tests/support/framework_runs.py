"""Runs the examples of the frameworks on two workers each, and writes what came of it as JSON.

    python tests/support/framework_runs.py results.json

A process of its own: its fork server imports the frameworks, which takes ten seconds of CPU time.
"""

import hashlib
import json
import sys
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gossipdp.launcher.local import launch, start_fork_server

EXAMPLES = Path(__file__).parents[2] / "examples"
# What is the wrapper in each; plain_ddp has none.
WRAPPERS = {
    "plain_ddp": None,
    "plain_gossipdp": "model",
    "accelerate_loop": "model",
    "huggingface_trainer": "gossip.model",
    "lightning_module": "strategy.gossip",
}
FRAMEWORKS = ("accelerate", "transformers.trainer", "lightning.pytorch")
# Of the twenty epochs of the examples, so that a run ends soon.
EPOCHS = 8


def run_example(name: str, wrapper: str | None) -> dict[str, Any]:
    path = EXAMPLES / f"{name}.py"
    text = path.read_text()
    shorter = text.replace("20 * 1437", f"{EPOCHS} * 1437").replace("range(20)", f"range({EPOCHS})")
    assert shorter != text
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    exec(compile(shorter, path, "exec"), names)
    found = SimpleNamespace(**names)
    outcome = {"accuracy": found.accuracy}
    if wrapper is not None:
        model = attrgetter(wrapper)(found)
        outcome |= {"samples": model.stats().samples, "state": digest(model.module)}
    return outcome


def digest(module: Any) -> str:
    hashed = hashlib.sha256()
    for value in module.state_dict().values():
        hashed.update(value.detach().contiguous().numpy().tobytes())
    return hashed.hexdigest()


def main(results: Path) -> None:
    start_fork_server(also=FRAMEWORKS)
    outcomes = {
        name: launch(run_example, 2, (name, wrapper), timeout_s=600)
        for name, wrapper in WRAPPERS.items()
    }
    results.write_text(json.dumps(outcomes, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
