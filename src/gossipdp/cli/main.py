"""``gossipdp``: finds the subcommand, reads its arguments, turns errors into one line.

``torch`` is imported by no module here, only by what a subcommand runs: help is quick.
"""

import dataclasses
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import tyro

import gossipdp
from gossipdp import logs
from gossipdp.cli.run import split_script
from gossipdp.errors import GossipError, RendezvousError

# A subcommand NAME is the module gossipdp.cli.NAME, which holds the dataclass NameArguments (its
# docstring is the help) and run(arguments) -> exit code, and imports nothing slow by itself.
COMMANDS = (
    "run",
    "train",
    "plan",
    "simulate",
    "demo",
    "top",
    "bench",
    "doctor",
    "reproduce",
    "report",
)

DESCRIPTION = "Asynchronous, decentralized data-parallel training for PyTorch."
# No "None" among the choices, no --no-FLAG; common options may follow the name of a benchmark.
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


def main(argv: Sequence[str] | None = None) -> int:
    """The ``gossipdp`` program.

    Returns:
        0, 1 for a run that failed, 2 for a mistake in the call, 130 after Ctrl+C.

    Example:
        >>> main(["--version"])
        gossipdp 0.1.0
        0
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--version"]:
        sys.stdout.write(f"gossipdp {gossipdp.__version__}\n")
        return 0
    debug = False
    try:
        call = _parse(words)
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
    if name not in COMMANDS:
        # Shows the help, or what is wrong; either way it exits.
        tyro.cli(_any_command(), prog="gossipdp", description=DESCRIPTION, args=words, config=STYLE)
        raise AssertionError(f"tyro accepted {words}")
    module, kind = _load(name)
    options, script = split_script(words[1:]) if name == "run" else (words[1:], [])
    given = tyro.cli(
        _with_common(name),
        prog=f"gossipdp {name}",
        description=kind.__doc__,
        args=options,
        config=STYLE,
    )
    arguments = given.arguments
    if name == "run":
        arguments = dataclasses.replace(arguments, script=tuple(script))
    return _Call(module.run, arguments, given.common)


_annotated: Any = Annotated  # to mypy, a class in a variable is no type


def _load(name: str) -> tuple[Any, type[Any]]:
    module = importlib.import_module(f"gossipdp.cli.{name}")
    return module, getattr(module, f"{name.capitalize()}Arguments")


def _with_common(name: str) -> Any:
    """A dataclass of the subcommand's options and the common ones, for tyro to fill."""
    _, kind = _load(name)
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
