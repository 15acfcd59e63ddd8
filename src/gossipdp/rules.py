"""The rules of options, stated once for the wrapper and the commands.

A rule takes an option's name, as its user writes it, and its value; it returns the value, numbers
as Python's own, which logs and status pages can hold, and raises ValueError for an invalid one.
"""

import contextlib
import dataclasses
import math
import operator
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

Rule = Callable[[str, Any], Any]

DEFAULT_GRAPH = "exponential"
"""Trains as well as any other with 4 to 64 workers (benchmarks/results/graphs.md), and costs each
worker about 2 log2 n links. Up to 5 workers it is complete."""

WireFormatName = Literal["auto", "full", "bfloat16", "lattice8"]
"""``auto``, and the names of ``FORMATS`` in ``gossip/codec.py``, which imports torch."""


def one_of(choices: tuple[str, ...], name: str, value: Any) -> Any:
    """Return the value if it is one of these texts."""
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; choose one of: {', '.join(choices)}")
    return value


def number(
    name: str, value: Any, *, least: float = 0.0, below: float = math.inf, is_positive: bool = False
) -> float:
    """Return a finite number within bounds, also one of NumPy's."""
    with contextlib.suppress(TypeError, ValueError):
        given = float(_no_bool(value))
        if math.isfinite(given) and least <= given < below and (given > 0 or not is_positive):
            return given
    kind = "a positive number" if is_positive else f"a number of at least {least:g}"
    bound = "" if below == math.inf else f" and below {below:g}"
    raise ValueError(f"{name} is {value!r}; it must be {kind}{bound}")


def whole_number(name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> int:
    """Return a whole number within bounds, such as 1e6."""
    try:
        is_whole = isinstance(value, float) and value.is_integer()
        given = int(value) if is_whole else operator.index(_no_bool(value))
    except TypeError:
        raise ValueError(f"{name} is {value!r}; it must be a whole number: pass an int") from None
    if given < least or given > most:
        bounds = f"at least {least}" if most == math.inf else f"in {least}..{most}"
        raise ValueError(f"{name} is {given}; it must be {bounds}")
    return given


def _no_bool(value: Any) -> Any:
    """Return it; raise TypeError for True and False, which Python takes for 1 and 0."""
    if isinstance(value, bool):
        raise TypeError
    return value


def output_file(name: str, path: Path) -> Path:
    """Return the path of a file that can be written; make nothing."""
    directory = path.absolute().parent
    if not directory.is_dir():
        raise ValueError(f"{name} {path}: the directory to write it to does not exist")
    if path.is_dir() or not os.access(path if path.exists() else directory, os.W_OK):
        raise ValueError(f"{name} {path} cannot be written: name a file that can")
    return path


positive_number = partial(number, is_positive=True)
megabits_per_s = partial(number, least=0.01)


def comm_rate(name: str, value: Any) -> float | str:
    """Return exchanges per gradient step, or "auto"."""
    if not isinstance(value, str):
        return positive_number(name, value)
    if value != "auto":
        raise ValueError(f"{name} is {value!r}; give 'auto', or exchanges per gradient step")
    return value


def shown_rate(rate: float | str) -> str:
    """Return a comm rate as its user would write it."""
    return rate if isinstance(rate, str) else f"{rate:g}"


def grace_s() -> float:
    """Return how long a save may stand still, and a step go on after SIGTERM or Ctrl+C."""
    return positive_number("GOSSIPDP_GRACE_S", os.environ.get("GOSSIPDP_GRACE_S") or 30.0)


at_least_0, at_least_1 = partial(whole_number, least=0), partial(whole_number, least=1)
port_number = partial(whole_number, least=0, most=65535)


def option(default: Any, rule: Rule) -> Any:
    """Return a dataclass field that follows a rule; None passes too if it is the default."""
    return dataclasses.field(default=default, metadata={"rule": rule})


def check(options: object, shown: Callable[[str], str] = str) -> None:
    """Raise ValueError for the first value that is invalid; keep what the rules return.

    Args:
        options: a dataclass, whose fields may hold others.
        shown: turns a field's name into the option's, as its user writes it.
    """
    for each in dataclasses.fields(options):  # type: ignore[arg-type]
        value, rule = getattr(options, each.name), each.metadata.get("rule")
        if rule is None and dataclasses.is_dataclass(value):
            check(value, shown)
        elif rule is not None and not (value is None and each.default is None):
            object.__setattr__(options, each.name, rule(shown(each.name), value))


def check_flags(arguments: object) -> None:
    """Check the options of a command, before its work begins."""
    check(arguments, lambda name: f"--{name.replace('_', '-')}")


class Checked:
    """Options that follow the rules of their fields from their construction on."""

    def __post_init__(self) -> None:
        check(self)
