"""The cost of a start, by the modules that it imports: times vary by machine."""

import json
import os
import subprocess
import sys

import pytest
import torch
from run_processes import VARIABLES, free_port, run_python

from gossipdp.dynamics.update import compile_loops

HEAVY = {
    *("accelerate", "cloudpickle", "cryptography", "gossipdp_lab", "http.server", "jinja2"),
    *("joblib", "lightning", "llvmlite", "matplotlib", "networkx", "numba", "numpy", "PIL", "ray"),
    *("rich", "scipy", "sklearn", "tensorboard", "torch", "transformers", "tyro"),
}
"""Each takes a start longer than most of gossipdp's own modules together; used here and there."""

# Its step may need no exchange, so it goes on until there was one; the end is everyone's. The
# workers are forked where torch is imported once for all.
WORKERS = """
import json, os, sys
import torch
before = set(sys.modules)
import gossipdp
from gossipdp import GossipDataParallel
imported = sorted(set(sys.modules) - before)

def train(variables):
    os.environ.update(variables)
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model = GossipDataParallel(net, optimizer)
    while True:
        model(torch.zeros(1, 2)).sum().backward()
        optimizer.step()
        if model.world_size == 1 or model.stats().exchanges:
            break
    model.consolidate()
    with open(variables["FOUND"], "w") as file:
        json.dump([imported, sorted(sys.modules)], file)
    model.close()

workers = []
for variables in json.loads(sys.argv[1]):
    workers.append(os.fork())
    if not workers[-1]:
        train(variables)
        sys.exit()
assert not any(os.waitpid(worker, 0)[1] for worker in workers)
"""


def imported_by(words: list[str]) -> set[str]:
    """Return the modules of a program that ran in a fresh interpreter, in the words of a shell."""
    code = (
        "import runpy, sys\n"
        f"sys.argv = {['gossipdp', *words]!r}\n"
        "try:\n    runpy.run_module('gossipdp', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "sys.stderr.write(' '.join(sys.modules))"
    )
    done = run_python("-c", code, environment=os.environ, check=True)
    return set(done.stderr.split())


@pytest.mark.processes
def test_importing_wrapping_and_training_import_little(tmp_path):
    compile_loops(torch.float32, torch.float32)  # kept from now on, if they were not
    compile_loops(torch.float32, torch.bfloat16)
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    workers = {"alone": {"GOSSIPDP_KERNELS": "numba"}} | {
        rank: {**store, "RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank} for rank in "01"
    }
    given = [{**each, "FOUND": str(tmp_path / name)} for name, each in workers.items()]
    command = [sys.executable, "-c", WORKERS, json.dumps(given)]
    subprocess.run(command, env=VARIABLES, check=True, timeout=200)
    for name in workers:
        imported, trained = map(set, json.loads((tmp_path / name).read_text()))
        assert "gossipdp.parallel.module" in imported
        libraries = {name.split(".")[0] for name in imported} - sys.stdlib_module_names
        assert libraries <= {"gossipdp", "msgspec", "numpy", "safetensors"}
        # Parts of torch that `import torch` leaves out are left out for their time.
        assert not [name for name in imported if name.startswith("torch.")]
        layers = {name.split(".")[1] for name in imported if name.startswith("gossipdp.")}
        assert not layers & {"cli", "integrations"}
        assert "gossipdp.gossip.thread" in trained
        loads = {"llvmlite"} if name == "alone" else set()  # which is quick, unlike numba
        assert trained & HEAVY <= {"numpy", "torch"} | loads


def test_help_imports_little():
    assert imported_by(["--help"]) & HEAVY <= {"gossipdp_lab", "rich", "tyro"}


@pytest.mark.parametrize(
    ("words", "heavy"), [("run --help", {"tyro"}), ("plan --workers 4", {"numpy", "rich", "tyro"})]
)
def test_a_command_imports_little_and_no_other(words, heavy):
    imported = imported_by(words.split())
    assert imported & HEAVY == heavy
    assert "gossipdp.cli.top" not in imported
