"""What ``gossipdp doctor`` finds: a verdict on each thing, with advice where there is any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what, in a word or two.
        verdict: ``ok``; ``warn``: it works, but slower or with less than there could be; ``fail``:
            training does not work here before this is mended.
        found: what there is.
        advice: what to do about it, one sentence; empty where there is nothing to do.
        figures: numbers and names for programs that read ``--json``.
    """

    name: str
    verdict: Verdict
    found: str
    advice: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


Check = tuple[str, Callable[[], Finding]]
"""The name of what is looked at, and what looks."""


def examine(checks: Sequence[Check], begins: Callable[[str], None]) -> list[Finding]:
    """Look at one thing after the other; one that cannot be looked at keeps none from its turn.

    Args:
        checks: in the order in which they are shown.
        begins: called with the name of each before its turn.
    """
    findings = []
    for name, look in checks:
        begins(name)
        try:
            findings.append(look())
        except Exception as error:  # whatever is broken here is what the user came to learn
            findings.append(
                Finding(
                    name,
                    "fail",
                    f"trying it ended with {type(error).__name__}: {error}",
                    "mend what the message names, and run gossipdp doctor again",
                )
            )
    return findings
