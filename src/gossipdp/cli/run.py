"""``gossipdp run -n 4 train.py ARGS``: a script on several workers."""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from gossipdp.cli.run_launched import is_launched, launched_team, launched_variables

if TYPE_CHECKING:
    from gossipdp.runtime.team import Team


@dataclasses.dataclass(frozen=True)
class RunArguments:
    """Run a training script on several workers and watch them one by one.

    gossipdp run -n 4 train.py ARGS, or gossipdp run -n 4 -m package.module ARGS.
    Everything after the script belongs to the script.
    """

    workers: Annotated[int | None, tyro.conf.arg(aliases=("-n",))] = None
    """How many workers to start here; with --join 1 by default. Needed but where torchrun, srun or
    an indexed Job of Kubernetes started this process: it starts the one worker of that rank."""

    max_restarts: int = 0
    """How often workers that died are started again, all of them here together."""

    host: str | None = None
    """Address of this machine on which workers meet and listen; by default 127.0.0.1, with several
    hosts the one from which --rendezvous is reached, with --join that from which a worker is."""

    port: int = 0
    """Port on which workers meet; 0 for any free one."""

    nnodes: int = 1
    """On how many hosts gossipdp run is called, with the same -n on each."""

    node_rank: int = 0
    """Which of them this is, from 0."""

    rendezvous: str | None = None
    """HOST:PORT of host 0, where the workers of several hosts meet; instead of --port."""

    join: str | None = None
    """HOST:PORT of one or more workers, with commas between them, of a run that goes on and that
    the workers started here join."""

    secret_file: Path | None = None
    """File with the workers' common secret; by default GOSSIPDP_SECRET, else a random one."""

    tls_cert: Path | None = None
    """PEM file with the workers' certificate, for mutual TLS on every link."""

    tls_key: Path | None = None
    """PEM file with its key."""

    tls_ca: Path | None = None
    """PEM file with the authority that signed the certificates of all workers."""

    log_dir: Path | None = None
    """Directory where each worker writes its log, for gossipdp report."""

    status_port: int | None = None
    """Worker r shows its status for gossipdp top and Prometheus on this port + r; 0: on any free
    one."""

    status_host: str | None = None
    """Address on which it does; by default 127.0.0.1."""

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
    from gossipdp.runtime.crew import Failure, shown_rank
    from gossipdp.runtime.launched_team import LaunchedTeam
    from gossipdp.runtime.restarts import Restarts
    from gossipdp.runtime.supervisor import Supervisor, check_num_workers
    from gossipdp.runtime.team import HostingTeam

    # What can be wrong is told before a port is taken.
    num_workers = check_num_workers(_num_workers(arguments))
    Restarts(arguments.max_restarts)
    script = _script(arguments)
    tls = _tls_variables(arguments)
    log_dir = {"GOSSIPDP_LOG_DIR": str(arguments.log_dir.absolute())} if arguments.log_dir else {}
    status = _status_variables(arguments)
    num_restarts = 0
    some_go_on = False

    def tell(failure: Failure, others_go_on: bool) -> None:
        nonlocal num_restarts, some_go_on
        some_go_on = others_go_on
        then = "the others go on" if others_go_on else "the run had not begun, so all are ended"
        if failure.restart_in_s is not None:
            num_restarts += 1
            count = f"restart {num_restarts} of {arguments.max_restarts}"
            then = f"it is started again in {failure.restart_in_s:.1f} s ({count})"
        _tell(f"worker {shown_rank(failure.rank)} {failure.ending.reason}; {then}")

    team = _team(arguments, tls)
    supervisor = Supervisor(
        [sys.executable, "-u", *script],
        num_workers,
        team=team,
        max_restarts=arguments.max_restarts,
        modules=["gossipdp.parallel.module", "networkx"],
        host=None if isinstance(team, HostingTeam) and not arguments.rendezvous else arguments.host,
        variables={**_own_share(arguments), **os.environ, **tls, **log_dir, **status},
        on_failure=tell,
        on_addresses=(lambda addresses: None) if team.rank(0) else _JoinLine(arguments),
    )
    if not isinstance(team, LaunchedTeam):
        noun = "worker" if num_workers == 1 else "workers"
        _tell(f"starting {num_workers} {noun}; importing torch takes some seconds")
    waits = False
    try:
        code = supervisor.run()
        if report := supervisor.report():
            _tell(f"what failed:\n{report}")
        waits = code == 1 and some_go_on
    finally:  # however it ends: others may wait for this one's end
        if isinstance(team, LaunchedTeam) and (lost := team.tell_ended(wait=waits)):
            ranks = ", ".join(map(str, lost))
            _tell(f"not waiting for the end of workers {ranks}: their supervisors are lost")
    _flush_or_drop()
    if "torch" in sys.modules:
        # Nothing is left to do, and without torch's own end, or that of its import, it is quick.
        os._exit(code)
    return code


def _flush_or_drop() -> None:
    """Let go of what cannot be written: at exit the interpreter would fail for it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


class _JoinLine:
    """Says once how to add workers, where others can know the secret."""

    def __init__(self, arguments: RunArguments) -> None:
        self._file = arguments.secret_file
        self._tls = "".join(
            f" --{name.replace('_', '-')} {path}"
            for name in ("tls_cert", "tls_key", "tls_ca")
            if (path := getattr(arguments, name)) is not None
        )
        self._log_dir = f" --log-dir {arguments.log_dir}" if arguments.log_dir else ""
        self._is_due = read_secret(self._file) is not None and arguments.join is None

    def __call__(self, addresses: Mapping[int, tuple[str, int]]) -> None:
        from gossipdp.runtime.environment import show_address

        if not self._is_due or not addresses:
            return
        self._is_due = False
        where = show_address(*addresses[min(addresses)])
        secret = f" --secret-file {self._file}" if self._file is not None else ""
        options = f"{where}{secret}{self._tls}{self._log_dir}"
        _tell(f"to add a worker: gossipdp run --join {options} SCRIPT")


def _num_workers(arguments: RunArguments) -> int:
    if arguments.workers is not None:
        return arguments.workers
    if arguments.join is None and not is_launched():
        raise ValueError("-n (--workers) is missing; say how many workers to start")
    return 1


def _is_launched(arguments: RunArguments) -> bool:
    return arguments.workers is None and arguments.join is None and is_launched()


def _own_share(arguments: RunArguments) -> dict[str, str]:
    return launched_variables() if _is_launched(arguments) else {}


def _team(arguments: RunArguments, tls_of_workers: Mapping[str, str]) -> "Team":
    """Whom the workers meet: one another here, those on other hosts, or a run that goes on."""
    from gossipdp.runtime.environment import read_addresses, tls_from
    from gossipdp.runtime.run_id_query import ask_run_id
    from gossipdp.runtime.team import HostingTeam, JoiningTeam, RemoteTeam
    from gossipdp.runtime.tls import Tls

    secret = read_secret(arguments.secret_file)
    num_local = _num_workers(arguments)
    if _is_launched(arguments):
        if arguments.nnodes != 1 or arguments.rendezvous or arguments.node_rank or arguments.port:
            raise ValueError(
                "--nnodes, --node-rank, --rendezvous and --port need -n; without it the launcher "
                "of this process says the rank and where the workers meet"
            )
        return launched_team(secret, arguments.host)
    several = arguments.nnodes != 1 or arguments.rendezvous is not None
    if arguments.join is not None:
        if several or arguments.port:
            raise ValueError(
                "--join needs none of --nnodes, --node-rank, --rendezvous and --port: the workers "
                "of the run know the others"
            )
        addresses = read_addresses("--join", arguments.join)
        files = tls_from(tls_of_workers)
        if secret is None:
            raise ValueError(
                "--join needs the run's secret: give --secret-file (or GOSSIPDP_SECRET), as the "
                "run was given it"
            )
        return JoiningTeam(addresses, ask_run_id(addresses, Tls(files) if files else None), secret)
    if not several:
        if arguments.node_rank:
            raise ValueError("--node-rank without --nnodes; say how many hosts there are")
        return HostingTeam(num_local, arguments.host or "127.0.0.1", arguments.port, secret)
    addresses = read_addresses("--rendezvous", arguments.rendezvous or "")
    if len(addresses) != 1 or arguments.port:
        raise ValueError(
            "several hosts need one --rendezvous HOST:PORT, the same on all, with an address of "
            "host 0 and a free port there; --port is for one host"
        )
    ((host, port),) = addresses
    if arguments.node_rank == 0:
        return HostingTeam(num_local, host, port, secret, num_nodes=arguments.nnodes)
    return RemoteTeam(
        num_local, host, port, secret, num_nodes=arguments.nnodes, node_rank=arguments.node_rank
    )


def _script(arguments: RunArguments) -> tuple[str, ...]:
    script = arguments.script
    if not script or script == ("-m",):
        raise ValueError(
            "no script to run; write it after the options: gossipdp run -n 4 train.py ARGS"
        )
    if script[0] != "-m" and not os.path.exists(script[0]):
        raise ValueError(f"no such script: {script[0]} (in {os.getcwd()})")
    return script


def read_secret(path: Path | None) -> str | None:
    """What ``--secret-file`` holds; without one GOSSIPDP_SECRET, None where that is not set.

    Raises:
        ValueError: the file cannot be read, or is empty.
    """
    if path is None:
        return os.environ.get("GOSSIPDP_SECRET") or None
    try:
        secret = path.read_text("utf-8").strip()
    except OSError as error:
        raise ValueError(
            f"--secret-file {path} cannot be read: {error.strerror}; name a file with a long "
            "random text"
        ) from None
    except UnicodeDecodeError:
        raise ValueError(f"--secret-file {path} is not UTF-8 text; write text into it") from None
    if not secret:
        raise ValueError(f"--secret-file {path} is empty; write a long random text into it")
    return secret


def _status_variables(arguments: RunArguments) -> dict[str, str]:
    """What tells the workers where to show their status."""
    port = arguments.status_port
    if port is not None and not 0 <= port < 65536:
        raise ValueError(f"--status-port is {port}; it must be in 0..65535")
    variables = {} if port is None else {"GOSSIPDP_STATUS_PORT": str(port)}
    if arguments.status_host is not None:
        variables["GOSSIPDP_STATUS_HOST"] = arguments.status_host
    return variables


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
    with suppress(OSError):  # a full disk under the log ends no run
        sys.stderr.write(f"gossipdp: {text}\n")
        sys.stderr.flush()
