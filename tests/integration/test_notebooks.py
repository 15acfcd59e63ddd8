"""The notebooks run from the first cell to the last, and their pages show what stands in them."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from notebook_pages import DIRECTORY, page_of

NOTEBOOKS = sorted(DIRECTORY.glob("*.ipynb"))
# What must hold after the last cell, printed as JSON by one more.
CHECKS = {
    "first_run": """
import json
print(json.dumps({
    "digests": len({result["digest"] for result in results}),
    "exchanges": [result["stats"].exchanges for result in results],
    "steps": [result["stats"].gradient_steps for result in results],
    "accuracy": results[0]["accuracy"],
}))""",
    "choosing_a_graph": """
import json
print(json.dumps({
    "speedup": plan(build_graph("ring", 64)).expected_speedup,
    "ring": [float(word) for word in rows[0].split()[2:]],
}))""",
}

pytestmark = [
    # jupyter_client's sockets, which it closes when the interpreter collects them.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def run(path: Path) -> dict:
    """Run all cells, and the check; what the check says."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(CHECKS[path.stem]))
    NotebookClient(
        notebook, timeout=90, resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    printed = "".join(output.text for output in notebook.cells[-1].outputs)
    return json.loads(printed)


@pytest.fixture(autouse=True)
def _no_traces_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.processes
def test_a_first_run():
    found = run(DIRECTORY / "first_run.ipynb")
    assert found["digests"] == 1
    assert all(exchanges > 0 for exchanges in found["exchanges"])
    assert found["steps"][2] < min(found["steps"][rank] for rank in (0, 1, 3))
    assert found["accuracy"] > 0.8


def test_choosing_a_graph():
    found = run(DIRECTORY / "choosing_a_graph.ipynb")
    assert found["speedup"] == pytest.approx(14.52, abs=0.01)
    a2cid2, gossip = found["ring"]
    assert a2cid2 < 0.5 * gossip


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_the_page_of_a_notebook_is_up_to_date(path: Path):
    text, figures = page_of(path)
    fix = "run python tools/notebook_pages.py"
    assert path.with_suffix(".md").read_text() == text, fix
    assert figures
    for name, content in figures.items():
        assert (DIRECTORY / name).read_bytes() == content, fix


def test_there_is_a_check_for_each_notebook():
    assert [path.stem for path in NOTEBOOKS] == sorted(CHECKS)
