"""The notebook runs in a kernel from the first cell to the last."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [
    # jupyter_client's sockets, which it closes when the interpreter collects them.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CHECK = """
import json
print(json.dumps({
    "digests": len({result["digest"] for result in results}),
    "exchanges": [result["stats"].exchanges for result in results],
    "steps": [result["stats"].gradient_steps for result in results],
    "accuracy": results[0]["accuracy"],
}))"""


@pytest.mark.processes
def test_a_first_run_in_a_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    notebook = nbformat.read(EXAMPLES / "first_run.ipynb", as_version=4)
    (run,) = [cell for cell in notebook.cells if "args=(24_000,)" in cell.source]
    run.source = run.source.replace("24_000", "12_000")
    notebook.cells.append(nbformat.v4.new_code_cell(CHECK))
    NotebookClient(notebook, timeout=270, resources={"metadata": {"path": EXAMPLES}}).execute()
    found = json.loads("".join(output.text for output in notebook.cells[-1].outputs))
    assert found["digests"] == 1
    assert all(exchanges > 0 for exchanges in found["exchanges"])
    assert found["steps"][2] < min(found["steps"][rank] for rank in (0, 1, 3))
    assert found["accuracy"] > 0.8
