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
from importlib import metadata
from typing import Annotated, Any, Literal

import docstring_parser
import tyro

import gossipdp
from gossipdp import logs
from gossipdp.cli.option_checks import check_outputs
from gossipdp.cli.run import split_script
from gossipdp.errors import GossipError, RendezvousError

# A subcommand is a module: of this package, or, by an entry point, of the lab. It holds the
# dataclass NameArguments (its docstring is the help) and run(arguments) -> exit code, and imports
# nothing slow by itself.
HERE = {
    "run": "gossipdp.cli.run",
    "plan": "gossipdp.cli.plan",
    "top": "gossipdp.cli.top",
    "tls-init": "gossipdp.cli.tls_init",
}
LAB = {point.name: point.value for point in metadata.entry_points(group="gossipdp.commands")}
COMMANDS = {**HERE, **LAB}

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
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if words[0] not in LAB or missing.startswith("gossipdp"):
            raise
        sys.stderr.write(
            f"gossipdp: error: gossipdp {words[0]} is part of the lab, and {missing} is not "
            "installed: pip install 'gossipdp[lab]'\n"
        )
        return USAGE
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
    module = frames[-1][0].f_globals.get("__name__", "") if frames else ""
    return module.partition(".")[0] in ("gossipdp", "gossipdp_lab")


def _parse(words: list[str]) -> tuple[Any, Any, Common]:
    """The subcommand's module, its arguments, and the options of all."""
    name = words[0] if words else ""
    if name in ("-h", "--help"):
        kinds = [_annotated[_load(each)[1], tyro.conf.subcommand(each)] for each in COMMANDS]
        more = "gossipdp COMMAND --help shows a command's options, gossipdp --version the version."
        _cli(functools.reduce(operator.or_, kinds), "gossipdp", f"{DESCRIPTION}\n\n{more}", words)
    if name not in COMMANDS:
        likely = difflib.get_close_matches(name, COMMANDS, 1)
        told = f"there is no command {name!r}" if name else "no command is given"
        hint = f"do you mean gossipdp {likely[0]}?" if likely else "gossipdp --help shows all"
        raise UsageError(f"{told}; {hint}")
    module, kind = _load(name)
    _set_help(Common)
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
    module = importlib.import_module(COMMANDS[name])
    kind = getattr(module, "".join(word.capitalize() for word in words) + "Arguments")
    _set_help(kind)
    return module, kind


def _set_help(kind: Any) -> None:
    """Have each option's help be one paragraph, without "(default: None)" and "(default: False)".

    tyro takes a line of a docstring that is indented, as all but its first are, for a paragraph.
    """
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        for part in typing.get_args(kind):  # of a union of subcommands, or what is annotated
            _set_help(part)
        return
    hints = typing.get_type_hints(kind, include_extras=True)
    told = {
        each.arg_name: " ".join((each.description or "").split())
        for base in reversed(kind.__mro__[:-1])
        for each in docstring_parser.parse_from_object(base).params
    }
    for field in dataclasses.fields(kind):
        _set_help(hints[field.name])
        hint = "" if field.default is None or field.default is False else None
        text = tyro.conf.arg(help=told.get(field.name), help_behavior_hint=hint)
        kind.__annotations__[field.name] = _annotated[hints[field.name], text]


def _cli(kind: Any, program: str, description: str | None, words: Sequence[str]) -> Any:
    """Parse by tyro, whose complaint is raised as one line; help is shown, and exits."""
    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown):
            return tyro.cli(kind, prog=program, description=description, args=words, config=STYLE)
    except SystemExit as ended:
        if not ended.code:
            raise
    complaint = _complaint(shown.getvalue())
    is_whole = complaint.endswith("?") or "choose one of" in complaint
    more = "" if is_whole else f"; {program} --help shows all"
    raise UsageError(complaint + more)


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
        'there is no option --a; do you mean --b?'
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
    if missing := re.match(r"Missing from .*?: (\S+)", text):
        return f"{missing[1]} is missing"
    if without := re.match(r"Missing value for argument '(.*?)'", text):
        return f"{without[1]} needs a value"
    if choices := re.fullmatch(r"Expected one of \{(.*)\}", text):
        return f"one of {choices[1]} is missing"
    text = text[:1].lower() + text[1:]
    unknown = re.match(r"unrecognized options: ([^\s,]+)", text)
    for paragraph in paragraphs[1:]:
        what, _, proposed = paragraph.partition(": ")
        if unknown and what == "Available subcommands":
            return f"there is no {unknown[1]!r}; {_likely(unknown[1], proposed.split(', '))}"
        if unknown and what == "Perhaps you meant":
            likely = proposed.split()[0].rstrip(",")
            return f"there is no option {unknown[1]}; do you mean {likely}?"
    if unknown:
        is_option = unknown[1].startswith("-")
        return f"there is no option {unknown[1]}" if is_option else f"{unknown[1]!r} is too much"
    return text


def _likely(word: str, known: Sequence[str]) -> str:
    """A proposal in place of a word that is not known."""
    likely = difflib.get_close_matches(word, known, 1)
    return f"do you mean {likely[0]}?" if likely else f"choose one of {', '.join(known)}"


if __name__ == "__main__":
    sys.exit(main())
