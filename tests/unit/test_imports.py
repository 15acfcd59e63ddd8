"""The cost of the first import and of wrapping, by their modules: times vary by machine."""

import json
import subprocess
import sys

PROGRAM = """
import json, sys
import torch
before = set(sys.modules)
import gossipdp
from gossipdp import GossipDataParallel
imported = set(sys.modules) - before
net = torch.nn.Linear(2, 1)
model = GossipDataParallel(net, torch.optim.SGD(net.parameters(), 0.1), budget_samples=1)
print(json.dumps([sorted(imported), sorted(sys.modules)]))
model.close()
"""
OF_THE_LAB = {"gossipdp_lab", "jinja2", "joblib", "matplotlib", "PIL", "sklearn"}


def test_importing_and_wrapping_import_little() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=100
    )
    imported, wrapped = json.loads(done.stdout)
    assert "gossipdp.parallel.module" in imported
    libraries = {name.split(".")[0] for name in imported} - sys.stdlib_module_names
    # networkx alone takes a quarter of a second: it is imported when a graph is made.
    assert libraries <= {"gossipdp", "msgspec", "numpy", "safetensors"}
    # Parts of torch that `import torch` leaves out are left out for their time.
    assert not [name for name in imported if name.startswith("torch.")]
    layers = {name.split(".")[1] for name in imported if name.startswith("gossipdp.")}
    assert not layers & {"cli", "integrations"}
    assert "gossipdp.gossip.thread" in wrapped
    assert not OF_THE_LAB & {name.split(".")[0] for name in wrapped}
