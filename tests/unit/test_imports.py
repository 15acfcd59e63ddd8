"""The cost of the first import and of wrapping, by their modules: times vary by machine."""

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
    assert not layers & {"cli", "integrations"}


WRAPPED = """
import json, sys, torch, gossipdp
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
model = gossipdp.GossipDataParallel(net, optimizer, budget_samples=1)
print(json.dumps(sorted(sys.modules)))
model.close()
"""
OF_THE_LAB = {"gossipdp_lab", "jinja2", "joblib", "matplotlib", "PIL", "sklearn"}


def test_wrapping_imports_nothing_of_the_lab() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRAPPED], capture_output=True, text=True, check=True, timeout=60
    )
    modules = json.loads(done.stdout)
    assert "gossipdp.gossip.thread" in modules
    assert not OF_THE_LAB & {name.split(".")[0] for name in modules}
