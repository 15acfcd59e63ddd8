"""Writes the options of commands into docs/cli.md, from the sources of their help.

Those of the other commands are left to the help.

    python tools/cli_page.py

A list of options follows each line ``<!-- options: NAME -->`` and ends at the next blank line.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
import typing
from pathlib import Path

from gossipdp.cli.main import Common
from gossipdp.cli.run import RunArguments

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
# The class that defines the options of a list.
LISTS: dict[str, type] = {"common": Common, "run": RunArguments}
NOT_OPTIONS = {"script"}


def helps(kind: type) -> dict[str, str]:
    """Return the text below each field of a dataclass, as the help shows it."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            found[field.target.id] = " ".join(str(text.value.value).split()) if is_text else ""
    return found


def options(kind: type) -> list[str]:
    """Return a line for each option that a dataclass itself defines."""
    hints = typing.get_type_hints(kind, include_extras=True)
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    lines = []
    for name, text in helps(kind).items():
        if name in NOT_OPTIONS or name not in defaults:
            continue
        notes = getattr(hints[name], "__metadata__", ())
        names = [each for note in notes for each in getattr(note, "aliases", None) or ()]
        names.append("--" + name.replace("_", "-"))
        default = defaults[name]
        if not isinstance(default, bool) and default not in (None, ()):
            names[-1] += f" {default:g}" if isinstance(default, float) else f" {default}"
        shown = ", ".join(f"`{each}`" for each in names)
        text = re.sub(r"([*\[])", r"\\\1", text)  # Markdown's own
        lines.append(f"- {shown}: {text}" if text else f"- {shown}")
    return lines


def page() -> str:
    """Return the page with the options of today."""
    text = PAGE.read_text()
    for name, kind in LISTS.items():
        lines = "\n".join(options(kind))
        marker = f"<!-- options: {name} -->\n\n"
        before, found, rest = text.partition(marker)
        assert found, name
        text = before + marker + lines + "\n" + re.sub(r"\A(- .*\n)*", "", rest)
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
