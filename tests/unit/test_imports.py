"""What the first import costs, told by what it imports: times would depend on the machine."""

import json
import subprocess
import sys

NEWLY_IMPORTED = """
import json, sys
import torch
before = set(sys.modules)
import gossipdp
from gossipdp import GossipDataParallel
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_beyond_torch_the_module_imports_little() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NEWLY_IMPORTED],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    modules = json.loads(done.stdout)
    assert "gossipdp.parallel.module" in modules
    libraries = {name.split(".")[0] for name in modules} - sys.stdlib_module_names
    # networkx alone takes a quarter of a second: it is imported when a graph is made.
    assert libraries <= {"gossipdp", "msgspec", "numpy", "safetensors"}
    # Parts of torch that `import torch` leaves out are left out for their time.
    assert not [name for name in modules if name.startswith("torch.")]
    layers = {name.split(".")[1] for name in modules if name.startswith("gossipdp.")}
    assert not layers & {"cli", "integrations", "tasks", "report", "simulate"}
