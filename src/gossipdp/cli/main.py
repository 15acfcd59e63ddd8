"""``gossipdp``: finds the subcommand, reads its arguments, turns errors into one line.

``torch`` is imported by no module here, only by what a subcommand runs: help is quick.
"""

import contextlib
import dataclasses
import difflib
import importlib
import inspect
import io
import os
import signal
import sys
import traceback
import typing
from collections.abc import Callable, Sequence
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
COMMANDS = (
    "run",
    "train",
    "plan",
    "simulate",
    "demo",
    "top",
    "doctor",
    "report",
    "tls-init",
)

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


@dataclasses.dataclass(frozen=True)
class _Call:
    run: Callable[[Any], int]
    arguments: Any
    common: Common


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
        call = _parse(words)
        check_outputs(call.arguments)
        debug = call.common.log_level == "debug"
        logs.configure("warning")
        if call.common.log_level is not None:
            os.environ["GOSSIPDP_LOG"] = call.common.log_level  # for the workers too
        logs.configure()
        return call.run(call.arguments)
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


def _parse(words: list[str]) -> _Call:
    name = words[0] if words else ""
    if name in ("-h", "--help"):
        _cli(_any_command(), "gossipdp", DESCRIPTION, words)
    if name not in COMMANDS:
        likely = difflib.get_close_matches(name, COMMANDS, 1)
        told = f"there is no command {name!r}" if name else "no command is given"
        hint = f"do you mean gossipdp {likely[0]}?" if likely else "gossipdp --help shows all"
        raise UsageError(f"{told}; {hint}")
    module, kind = _load(name)
    options, script = split_script(words[1:]) if name == "run" else (words[1:], [])
    given = _cli(_with_common(name), f"gossipdp {name}", inspect.getdoc(kind), options)
    arguments = given.arguments
    if name == "run":
        arguments = dataclasses.replace(arguments, script=tuple(script))
    return _Call(module.run, arguments, given.common)


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


def _complaint(box: str) -> str:
    r"""The first paragraph of what tyro complains about, and the option that it proposes.

    Example:
        >>> _complaint("╭─ No ─╮\n│ Unrecognized options: --a │\n│ ─── │\n│ Perhaps you meant: │"
        ...            "\n│     --b INT │\n╰──╯")
        'unrecognized options: --a; do you mean --b?'
    """
    lines = [line.strip("╭╮╰╯│ ") for line in box.strip().splitlines()[1:]]
    if lines and set(lines[0]) <= set("─-"):  # under the title, where there is no box
        del lines[0]
    ends = (index for index, line in enumerate(lines) if set(line) <= set("─-"))
    end = next(ends, len(lines))
    text = " ".join(line for line in lines[:end] if line).partition(" Got errors:")[0].rstrip(".")
    text = text.removeprefix("Error parsing ")
    text = text[:1].lower() + text[1:]
    if "Perhaps you meant:" in lines:
        proposed = lines[lines.index("Perhaps you meant:") + 1].split()[0].rstrip(",")
        text = f"{text}; do you mean {proposed}?"
    return text


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


def _with_common(name: str) -> Any:
    """A dataclass of the subcommand's options and the common ones, for tyro to fill."""
    _, kind = _load(name)
    _say_no_none(Common)
    unnamed = tyro.conf.arg(name="")
    fields = [("arguments", _annotated[kind, unnamed]), ("common", _annotated[Common, unnamed])]
    return dataclasses.make_dataclass("Words", fields)


def _any_command() -> Any:
    union: Any = None
    for name in COMMANDS:
        _, kind = _load(name)
        option = _annotated[kind, tyro.conf.subcommand(name)]
        union = option if union is None else union | option
    return union


def _is_ours(error: Exception) -> bool:
    """Whether the error was raised by gossipdp on purpose: in its own code, not beneath it.

    An OSError names the file or the address, which is enough.
    """
    if isinstance(error, (GossipError, OSError)):
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_globals.get("__name__", "").startswith("gossipdp.")


if __name__ == "__main__":
    sys.exit(main())
