"""The notebooks run from the first cell to the last, and their pages show what stands in them."""

import json
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pytest
from nbclient import NotebookClient
from notebook_pages import DIRECTORY, page_of

NOTEBOOKS = sorted(DIRECTORY.glob("*.ipynb"))

pytestmark = [
    # jupyter_client's sockets, which it closes when the interpreter collects them.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def shortened(name: str, *changes: tuple[str, str]) -> nbformat.NotebookNode:
    """Return the notebook with shorter runs: every change must find its place."""
    notebook = nbformat.read(DIRECTORY / f"{name}.ipynb", as_version=4)
    for old, new in changes:
        assert sum(cell.source.count(old) for cell in notebook.cells) == 1
        for cell in notebook.cells:
            cell.source = cell.source.replace(old, new)
    return notebook


@pytest.mark.processes
def test_a_first_run_in_a_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    notebook = shortened("first_run", ("args=(24_000,)", "args=(12_000,)"))
    check = """
import json
print(json.dumps({
    "digests": len({result["digest"] for result in results}),
    "exchanges": [result["stats"].exchanges for result in results],
    "steps": [result["stats"].gradient_steps for result in results],
    "accuracy": results[0]["accuracy"],
}))"""
    notebook.cells.append(nbformat.v4.new_code_cell(check))
    NotebookClient(notebook, timeout=270, resources={"metadata": {"path": DIRECTORY}}).execute()
    found = json.loads("".join(output.text for output in notebook.cells[-1].outputs))
    assert found["digests"] == 1
    assert all(exchanges > 0 for exchanges in found["exchanges"])
    assert found["steps"][2] < min(found["steps"][rank] for rank in (0, 1, 3))
    assert found["accuracy"] > 0.8


def test_choosing_a_graph(monkeypatch):
    """Here and not in a kernel: it starts no processes, and the imports are done."""
    matplotlib.use("Agg")
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    notebook = shortened("choosing_a_graph", ("num_steps=250", "num_steps=60"))
    names: dict[str, Any] = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            exec(cell.source, names)
    speedup = names["Constants"].of(names["build_graph"]("ring", 64)).expected_speedup
    assert speedup == pytest.approx(14.52, abs=0.01)
    a2cid2, gossip = (float(word) for word in names["rows"][0].split()[2:])
    assert a2cid2 < 0.5 * gossip


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_the_page_of_a_notebook_is_up_to_date(path):
    text, figures = page_of(path)
    fix = "run python tools/notebook_pages.py"
    assert path.with_suffix(".md").read_text() == text, fix
    assert figures
    for name, content in figures.items():
        assert (DIRECTORY / name).read_bytes() == content, fix
