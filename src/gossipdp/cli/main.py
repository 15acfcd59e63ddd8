"""The ``gossipdp`` program.

It reads the arguments of a subcommand, runs it, and shows an error of gossipdp's own as one line.
Help is quick, because no module here imports ``torch`` before a subcommand runs.
"""

import dataclasses
import functools
import importlib
import inspect
import operator
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Any

import tyro

import gossipdp
from gossipdp import logs
from gossipdp.cli.run import split_script
from gossipdp.errors import GossipError, RendezvousError
from gossipdp.rules import check_flags

# A subcommand is a module: of this package or, by an entry point, of the lab. It holds the
# dataclass NameArguments (its docstring is the help) and run(arguments) -> exit status. Importing
# it imports nothing slow.
HERE = {
    "run": "gossipdp.cli.run",
    "plan": "gossipdp.cli.plan",
    "top": "gossipdp.cli.top",
    "tls-init": "gossipdp.cli.tls_init",
}
LAB = {point.name: point.value for point in metadata.entry_points(group="gossipdp.commands")}
COMMANDS = {**HERE, **LAB}

DESCRIPTION = """Asynchronous, decentralized data-parallel training for PyTorch.

gossipdp COMMAND --help shows its options, gossipdp --version the version."""
# No --no-FLAG, and an option of all commands may stand after the task of gossipdp train.
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

    log_level: Annotated[
        logs.Level | None,
        tyro.conf.arg(help_behavior_hint=""),  # in place of "(default: None)"
    ] = None
    """Lowest level shown; by default GOSSIPDP_LOG, or warning."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``gossipdp`` program.

    Returns:
        0; 1 for a run that failed; 2 for a mistake in the call; 130 after Ctrl+C.

    Raises:
        SystemExit: tyro has shown help (0), or a mistake in the words of the call (2).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--version"]:
        sys.stdout.write(f"gossipdp {gossipdp.__version__}\n")
        return 0
    command = next((word for word in words if word in COMMANDS), "")
    level: str | None = None
    try:
        arguments, level = _parse(words, command)
        check_flags(arguments)
        logs.configure("warning")
        if level is not None:
            os.environ["GOSSIPDP_LOG"] = level  # for the workers too
        logs.configure()
        status: int = importlib.import_module(COMMANDS[command]).run(arguments)
        return status
    except KeyboardInterrupt:
        sys.stderr.write("gossipdp: interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:  # gossipdp plan | head
        sys.stderr.close()
        return FAILED
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if command not in LAB or missing.startswith("gossipdp"):
            raise
        sys.stderr.write(
            f"gossipdp: error: gossipdp {command} is part of the lab, and {missing} is not "
            "installed: pip install 'gossipdp[lab]'\n"
        )
        return USAGE
    except (GossipError, ValueError, OSError) as error:
        if level == "debug" or not _is_ours(error):
            raise
        sys.stderr.write(f"gossipdp: error: {error}\n")
        # A RendezvousError here, and not in a worker, is the port that the user chose.
        in_the_run = isinstance(error, GossipError) and not isinstance(error, RendezvousError)
        return FAILED if in_the_run else USAGE


def _parse(words: list[str], command: str) -> tuple[Any, str | None]:
    script: list[str] = []
    if command == "run":  # its options end where the script begins
        start = words.index(command) + 1
        options, script = split_script(words[start:])
        words = [*words[:start], *options]
    program, description = "gossipdp", DESCRIPTION
    if command:  # import its module alone: to import all takes half as long again
        words.remove(command)
        chosen = _arguments_of(command)
        program, description = f"gossipdp {command}", inspect.cleandoc(chosen.__doc__)
    else:
        chosen = functools.reduce(operator.or_, map(_listed, COMMANDS))
    call = dataclasses.make_dataclass(
        "Call",
        [("arguments", _annotated[chosen, tyro.conf.arg(name="")])],
        bases=(Common,),
        kw_only=True,
        frozen=True,
    )
    parsed: Any = tyro.cli(call, prog=program, description=description, args=words, config=STYLE)
    arguments = parsed.arguments
    if command == "run":
        arguments = dataclasses.replace(arguments, script=tuple(script))
    return arguments, parsed.log_level


_annotated: Any = Annotated  # to mypy, a class in a variable is no type


def _arguments_of(command: str) -> Any:
    module = importlib.import_module(COMMANDS[command])
    return getattr(module, command.title().replace("-", "") + "Arguments")


def _listed(command: str) -> Any:
    """Return that class with a help of a line or two, for the list of all commands."""
    kind = _arguments_of(command)
    short = kind.__doc__.partition("\n\n")[0]
    return _annotated[kind, tyro.conf.subcommand(command, description=short)]


def _is_ours(error: Exception) -> bool:
    """Return whether gossipdp's own code raised the error on purpose, and not code beneath it.

    An OSError names the file or the address, which is enough.
    """
    if isinstance(error, (GossipError, OSError)):
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    module = frames[-1][0].f_globals.get("__name__", "") if frames else ""
    return module.partition(".")[0] in ("gossipdp", "gossipdp_lab")
