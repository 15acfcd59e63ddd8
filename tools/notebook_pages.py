"""Makes the site's pages of the notebooks, from the outputs that stand in them.

    python tools/notebook_pages.py             # after an edit
    python tools/notebook_pages.py --execute   # run them first, and keep what they print and draw

Each docs/notebooks/NAME.ipynb becomes NAME.md with its figures NAME-1.png, NAME-2.png, ...
"""

import argparse
import base64
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient

DIRECTORY = Path(__file__).parents[1] / "docs" / "notebooks"


def execute(path: Path) -> None:
    """Run the notebook in a fresh kernel, and keep its outputs in it."""
    notebook = nbformat.read(path, as_version=4)
    # Neither the time nor the version of the machine that ran it: they change at each run.
    NotebookClient(notebook, timeout=120, record_timing=False).execute()
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, path)


def page_of(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return the page of a notebook, and its figures by file name."""
    notebook = nbformat.read(path, as_version=4)
    figures: dict[str, bytes] = {}
    parts: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for kind, content in _outputs(cell.outputs):
            if kind == "text":
                parts.append(f"```text\n{content.rstrip()}\n```")
            else:
                name = f"{path.stem}-{len(figures) + 1}.png"
                figures[name] = base64.b64decode(content)
                parts.append(f"![What this cell drew]({name})")
    notice = f"*This page is [a notebook]({path.name}) with the outputs of one real run.*"
    parts.insert(1, notice)
    return "\n\n".join(parts) + "\n", figures


def _outputs(outputs: list[nbformat.NotebookNode]) -> Iterator[tuple[str, str]]:
    # A kernel may send what a cell prints in several parts.
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    if printed:
        yield "text", printed
    for output in outputs:
        if output.output_type == "stream":
            continue
        if "image/png" in output.data:
            yield "png", output.data["image/png"]
        else:
            yield "text", output.data["text/plain"]


def main() -> None:
    """Write all pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--execute", action="store_true", help="run the notebooks first")
    arguments = parser.parse_args()
    for path in sorted(DIRECTORY.glob("*.ipynb")):
        if arguments.execute:
            execute(path)
        text, figures = page_of(path)
        path.with_suffix(".md").write_text(text)
        for name, content in figures.items():
            (DIRECTORY / name).write_bytes(content)


if __name__ == "__main__":
    main()
