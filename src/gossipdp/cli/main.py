"""``gossipdp``: finds the subcommand, reads its arguments, turns errors into one line.

``torch`` is imported by no module here, only by what a subcommand runs: help is quick.
"""

import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import io
import operator
import os
import re
import signal
import sys
import traceback
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import tyro

import gossipdp
from gossipdp import logs
from gossipdp.cli.option_checks import check_outputs
from gossipdp.cli.run import split_script
from gossipdp.errors import GossipError, RendezvousError

# A subcommand NAME is the module gossipdp.cli.NAME (tls-init: tls_init), which holds the dataclass
# NameArguments (its docstring is the help) and run(arguments) -> exit code, and imports nothing
# slow by itself.
COMMANDS = ("run", "train", "plan", "simulate", "demo", "top", "doctor", "report", "tls-init")

DESCRIPTION = "Asynchronous, decentralized data-parallel training for PyTorch."
# No "None" among the choices, no --no-FLAG.
STYLE = (
    tyro.conf.DisallowNone,
    tyro.conf.FlagCreatePairsOff,
    tyro.conf.CascadeSubcommandArgs,
    tyro.conf.OmitSubcommandPrefixes,
)
USAGE, FAILED, INTERRUPTED = 2, 1, 128 + signal.SIGINT


@dataclasses.dataclass(frozen=True)
class Common:
    """Options of every subcommand."""

    log_level: Literal["debug", "info", "warning", "error"] | None = None
    """Least important messages to show; by default GOSSIPDP_LOG, else warning."""


class UsageError(ValueError):
    """A mistake in the words of the call."""


def main(argv: Sequence[str] | None = None) -> int:
    """The ``gossipdp`` program.

    Returns:
        0, 1 for a run that failed, 2 for a mistake in the call, 130 after Ctrl+C.

    Example:
        >>> main(["--version"])
        gossipdp 0.2.0.dev0
        0
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--version"]:
        sys.stdout.write(f"gossipdp {gossipdp.__version__}\n")
        return 0
    debug = False
    try:
        module, arguments, common = _parse(words)
        check_outputs(arguments)
        debug = common.log_level == "debug"
        logs.configure("warning")
        if common.log_level is not None:
            os.environ["GOSSIPDP_LOG"] = common.log_level  # for the workers too
        logs.configure()
        status: int = module.run(arguments)
        return status
    except KeyboardInterrupt:
        sys.stderr.write("gossipdp: interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:  # gossipdp plan | head
        sys.stderr.close()
        return FAILED
    except (GossipError, ValueError, OSError) as error:
        if debug or not _is_ours(error):
            raise
        sys.stderr.write(f"gossipdp: error: {error}\n")
        # A RendezvousError here, and not in a worker, is the port that the user chose.
        in_the_run = isinstance(error, GossipError) and not isinstance(error, RendezvousError)
        return FAILED if in_the_run else USAGE


def _is_ours(error: Exception) -> bool:
    """Whether the error was raised by gossipdp on purpose: in its own code, not beneath it.

    An OSError names the file or the address, which is enough.
    """
    if isinstance(error, (GossipError, OSError)):
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_globals.get("__name__", "").startswith("gossipdp.")


def _parse(words: list[str]) -> tuple[Any, Any, Common]:
    """The subcommand's module, its arguments, and the options of all."""
    name = words[0] if words else ""
    if name in ("-h", "--help"):
        kinds = [_annotated[_load(each)[1], tyro.conf.subcommand(each)] for each in COMMANDS]
        _cli(functools.reduce(operator.or_, kinds), "gossipdp", DESCRIPTION, words)
    if name not in COMMANDS:
        likely = difflib.get_close_matches(name, COMMANDS, 1)
        told = f"there is no command {name!r}" if name else "no command is given"
        hint = f"do you mean gossipdp {likely[0]}?" if likely else "gossipdp --help shows all"
        raise UsageError(f"{told}; {hint}")
    module, kind = _load(name)
    _say_no_none(Common)
    unnamed = tyro.conf.arg(name="")
    fields = [("arguments", _annotated[kind, unnamed]), ("common", _annotated[Common, unnamed])]
    options, script = split_script(words[1:]) if name == "run" else (words[1:], [])
    given = _cli(
        dataclasses.make_dataclass("Words", fields),
        f"gossipdp {name}",
        inspect.getdoc(kind),
        options,
    )
    if name == "run":
        return module, dataclasses.replace(given.arguments, script=tuple(script)), given.common
    return module, given.arguments, given.common


_annotated: Any = Annotated  # to mypy, a class in a variable is no type


def _load(name: str) -> tuple[Any, type[Any]]:
    words = name.split("-")
    module = importlib.import_module(f"gossipdp.cli.{'_'.join(words)}")
    kind = getattr(module, "".join(word.capitalize() for word in words) + "Arguments")
    _say_no_none(kind)
    return module, kind


def _say_no_none(kind: Any) -> None:
    """Have the help of options that need not be given not say "(default: None)"."""
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        for part in typing.get_args(kind):  # of a union of subcommands, or what is annotated
            _say_no_none(part)
        return
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        if field.default is None:
            unsaid = tyro.conf.arg(help_behavior_hint="")
            kind.__annotations__[field.name] = _annotated[hints[field.name], unsaid]
        else:
            _say_no_none(hints[field.name])


def _cli(kind: Any, program: str, description: str | None, words: Sequence[str]) -> Any:
    """Parse by tyro, whose complaint is raised as one line; help is shown, and exits."""
    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown):
            return tyro.cli(kind, prog=program, description=description, args=words, config=STYLE)
    except SystemExit as ended:
        if not ended.code:
            raise
    raise UsageError(f"{_complaint(shown.getvalue())}; {program} --help shows all")


_NO_NUMBER = re.compile(
    r"Error parsing (?P<option>[^/:]+)\S*: (?:no type matching (?:INT|FLOAT) could be instantiated "
    r"from \[|invalid literal for int\(\) with base 10: |could not convert string to float: )"
    r"'(?P<value>.*)'\]?"
)
_NO_CHOICE = re.compile(
    r"(?:Error parsing \S+ )?[Ii]nvalid choice '(?P<value>.*)' for argument "
    r"'(?P<option>[^/']+).*'\. Expected one of (?P<known>.*)"
)


def _complaint(box: str) -> str:
    r"""What tyro complains about, in our words: one line, and what was likely meant.

    Example:
        >>> _complaint("╭─ No ─╮\n│ Unrecognized options: --a │\n│ ─── │\n│ Perhaps you meant: │"
        ...            "\n│     --b INT │\n╰──╯")
        'unrecognized options: --a; do you mean --b?'
        >>> _complaint("╭─ No ─╮\n│ Error parsing -n/--workers: invalid literal for int() with │"
        ...            "\n│ base 10: 'two'. │\n╰──╯")
        "-n is 'two'; it must be a whole number"
    """
    lines = [line.strip("╭╮╰╯│ ") for line in box.strip().splitlines()[1:]]
    paragraphs = re.split(r" ?[─-]{3,} ?", " ".join(line for line in lines if line).strip("─- "))
    text = paragraphs[0].partition(" Got errors:")[0].rstrip(".")
    if number := _NO_NUMBER.fullmatch(text):
        kind = "a number" if re.search("float|FLOAT", text) else "a whole number"
        return f"{number['option']} is {number['value']!r}; it must be {kind}"
    if choice := _NO_CHOICE.fullmatch(text):
        # tyro names those of an option that need not be given in any order, with None.
        known = sorted(set(re.findall(r"'([^']*)'", choice["known"])) - {"None"})
        return f"{choice['option']} is {choice['value']!r}; {_likely(choice['value'], known)}"
    text = text[:1].lower() + text[1:]
    for paragraph in paragraphs[1:]:
        what, _, proposed = paragraph.partition(": ")
        if what == "Available subcommands":
            word = text.partition(": ")[2].partition(",")[0]
            return f"there is no {word!r}; {_likely(word, proposed.split(', '))}"
        if what == "Perhaps you meant":
            return f"{text}; do you mean {proposed.split()[0].rstrip(',')}?"
    return text


def _likely(word: str, known: Sequence[str]) -> str:
    """A proposal in place of a word that is not known."""
    likely = difflib.get_close_matches(word, known, 1)
    return f"do you mean {likely[0]}?" if likely else f"choose one of {', '.join(known)}"


if __name__ == "__main__":
    sys.exit(main())
