"""``gossipdp run -n 4 train.py ARGS``: a script on several local workers."""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro


@dataclasses.dataclass(frozen=True)
class RunArguments:
    """Run a training script on several local workers and watch them one by one.

    gossipdp run -n 4 train.py ARGS, or gossipdp run -n 4 -m package.module ARGS.
    Everything after the script belongs to the script.
    """

    workers: Annotated[int, tyro.conf.arg(aliases=("-n",))]
    """How many workers to start."""

    host: str = "127.0.0.1"
    """Address of this machine on which workers meet; they listen on its interface too."""

    port: int = 0
    """Port on which workers meet; 0 for any free one."""

    secret_file: Path | None = None
    """File with the workers' common secret; by default GOSSIPDP_SECRET, else a random one."""

    tls_cert: Path | None = None
    """PEM file with the workers' certificate, for mutual TLS on every link."""

    tls_key: Path | None = None
    """PEM file with its key."""

    tls_ca: Path | None = None
    """PEM file with the authority that signed the certificates of all workers."""

    script: tyro.conf.Suppress[tuple[str, ...]] = ()


# Options of `gossipdp run` without a value; any other takes the next word, unless it has "=".
FLAGS = ("-h", "--help")


def split_script(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words after ``gossipdp run`` into its own options and the script with its words.

    Example:
        >>> split_script(["-n", "4", "train.py", "--lr", "0.1", "-n", "2"])
        (['-n', '4'], ['train.py', '--lr', '0.1', '-n', '2'])
        >>> split_script(["--workers=4", "-m", "package.train"])
        (['--workers=4'], ['-m', 'package.train'])
    """
    index = 0
    while index < len(words):
        word = words[index]
        if word == "-m" or not word.startswith("-"):
            break
        if word == "--":
            return list(words[:index]), list(words[index + 1 :])
        index += 1 if word in FLAGS or "=" in word else 2
    return list(words[:index]), list(words[index:])


def run(arguments: RunArguments) -> int:
    """Start the workers, wait for all, say at the end who failed and why; the exit code."""
    from gossipdp.runtime.crew import Failure
    from gossipdp.runtime.supervisor import Supervisor

    def tell(failure: Failure, others_go_on: bool) -> None:
        then = "the others go on" if others_go_on else "the run had not begun, so all are ended"
        _tell(f"worker {failure.rank} {failure.ending.reason}; {then}")

    supervisor = Supervisor(
        [sys.executable, "-u", *_script(arguments)],
        arguments.workers,
        host=arguments.host,
        port=arguments.port,
        secret=_secret(arguments.secret_file),
        variables={**os.environ, **_tls_variables(arguments)},
        on_failure=tell,
    )
    code = supervisor.run()
    if report := supervisor.report():
        _tell(f"\n{report}")
    return code


def _script(arguments: RunArguments) -> tuple[str, ...]:
    script = arguments.script
    if not script or script == ("-m",):
        raise ValueError(
            "no script to run; write it after the options: gossipdp run -n 4 train.py ARGS"
        )
    if script[0] != "-m" and not os.path.exists(script[0]):
        raise ValueError(f"no such script: {script[0]} (in {os.getcwd()})")
    return script


def _secret(path: Path | None) -> str | None:
    if path is None:
        return os.environ.get("GOSSIPDP_SECRET") or None
    secret = path.read_text("utf-8").strip()
    if not secret:
        raise ValueError(f"the secret file {path} is empty; write a long random text into it")
    return secret


def _tls_variables(arguments: RunArguments) -> dict[str, str]:
    """What tells the workers their TLS files, which are checked once here."""
    from gossipdp.runtime.environment import tls_from, tls_variables
    from gossipdp.runtime.tls import Tls, tls_files

    given = tls_files(arguments.tls_cert, arguments.tls_key, arguments.tls_ca)
    files = given or tls_from(os.environ)
    if files is None:
        return {}
    Tls(files)
    return tls_variables(files)


def _tell(text: str) -> None:
    sys.stderr.write(f"gossipdp: {text}\n")
    sys.stderr.flush()
