"""The site's reference from docstrings: reStructuredText's roles as Markdown.

A role such as ``:class:`~gossipdp.graph.Plan``` becomes the name that a reader knows, ``Plan``;
LaTeX becomes plain characters, since the site runs no script that could set it.
"""

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`(~?)([^`]+)`")
MATH = re.compile(r":math:`([^`]+)`")
CHARACTERS = (
    (r"\\tilde\s*\\alpha", "α̃"),
    (r"\\tilde\s*(\w)", "\\1\u0303"),
    (r"\\bar\s*(\w)", "\\1\u0304"),
    (r"\\eta", "η"),
    (r"\\theta", "θ"),
    (r"\\gamma", "γ"),
    (r"\\lambda", "λ"),
    (r"\\alpha", "α"),
    (r"\\tau", "τ"),
    (r"\\sum", "Σ"),
    (r"\\int", "∫"),
    (r"\\tfrac12", "½"),
    (r"\\cdot", "·"),
    (r"\\in\b", "∈"),
    (r"\\le\b", "≤"),
    (r"\\qquad", "   "),
    (r"\\([#{}])", r"\1"),
    (r"\\[, ]", " "),
    (r"_\{(\w+)\}", r"_\1"),
)
MATH_BLOCK = re.compile(r"^( *)\.\. math::[ ]*(.*(?:\n(?:\1 +\S.*|[ ]*(?=\n\1 )))*)", re.M)


class ReferenceStyle(Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite each object that griffe has read."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    """Return the text without reStructuredText's roles and directives."""
    docstring = MATH_BLOCK.sub(_math_block, docstring)
    docstring = MATH.sub(lambda formula: f"`{_characters(formula[1])}`", docstring)
    docstring = ROLE.sub(_name, docstring)
    docstring = re.sub(r"``([^`\n]+)``", r"`\1`", docstring)
    # griffe knows sections of examples by the plural.
    return re.sub(r"^( *)Example:$", r"\1Examples:", docstring, flags=re.M)


def _name(role: re.Match[str]) -> str:
    shortened, name = role.groups()
    return f"`{name.rpartition('.')[2] if shortened else name}`"


def _math_block(block: re.Match[str]) -> str:
    indent, formula = block.groups()
    lines = [_characters(line.strip()) for line in formula.splitlines() if line.strip()]
    return "\n".join([f"{indent}```text", *(indent + line for line in lines), f"{indent}```"])


def _characters(latex: str) -> str:
    for pattern, plain in CHARACTERS:
        latex = re.sub(pattern, plain, latex)
    return latex
