"""``gossipdp run -n 4 train.py ARGS``: a script on several workers.

Without ``-n``, under torchrun, srun or in an indexed Job, it starts the one worker of the rank that
this launcher assigned: ``torchrun --nproc-per-node 4 -m gossipdp run train.py``.
"""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from gossipdp.launcher import environment
from gossipdp.launcher.cores import num_threads
from gossipdp.launcher.faults import FaultInjector, FaultPlan
from gossipdp.links.tls import Tls, check_private
from gossipdp.rules import at_least_0, at_least_1, option, port_number

if TYPE_CHECKING:
    from gossipdp.launcher.launch_plan import LaunchPlan
    from gossipdp.launcher.supervisor import Supervisor


@dataclasses.dataclass(frozen=True)
class RunArguments:
    """Run a training script on several workers, and watch each.

    gossipdp run -n 4 train.py ARGS, or gossipdp run -n 4 -m package.module ARGS.
    Everything after the script belongs to the script.
    """

    workers: Annotated[int | None, tyro.conf.arg(aliases=("-n", "--nproc-per-node"))] = option(
        None, at_least_1
    )
    """Workers to start here; with --join 1 by default.
    Leave it out under torchrun, srun or an indexed Job, which give a rank."""

    nproc_per_replica: int = option(1, at_least_1)
    """Processes that share one replica (fully_shard); -n is a multiple of it."""

    max_restarts: int = option(0, at_least_0)
    """Restarts of dead workers, in all."""

    spares: int = option(1, at_least_0)
    """Idle interpreters with torch imported; each becomes a worker that is started again.
    Only with --max-restarts."""

    host: str | None = None
    """Address on which workers meet and listen; by default 127.0.0.1.
    With --rendezvous or --join, that of the interface that leads there."""

    nnodes: int = 1
    """Hosts; each calls gossipdp run with the same -n."""

    node_rank: int = 0
    """Number of this host, from 0."""

    rendezvous: str | None = None
    """HOST:PORT on host 0 where all workers meet; by default a free port of --host."""

    join: str | None = None
    """HOST:PORT of a worker of the job to join; with shards, one of each, with commas."""

    secret_file: Path | None = None
    """File of the common secret; by default GOSSIPDP_SECRET.
    Several hosts, and --join, need this or --tls."""

    tls: Path | None = None
    """Directory that gossipdp tls-init made; by default GOSSIPDP_TLS."""

    log_dir: Path | None = None
    """Directory of the workers' logs, for gossipdp report."""

    status_port: int | None = option(None, port_number)
    """Worker r shows its status on this port + r; 0: on any free port."""

    status_host: str | None = None
    """Address of the status ports; by default 127.0.0.1."""

    faults: str | None = None
    """Faults to test the script with, such as "kill every 60s; stop 8s 2 at 2m; slow 4x 1".
    docs/faults.md has all clauses."""

    faults_seed: int = option(0, at_least_0)
    """Seed of the workers that --faults draws."""

    script: tyro.conf.Suppress[tuple[str, ...]] = ()


# Options of `gossipdp run` without a value; any other takes the next word, unless it has "=".
FLAGS = ("-h", "--help")


def split_script(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words after ``gossipdp run`` into its own options and the script with its words."""
    options: list[str] = []
    rest = list(words)
    while rest and rest[0] != "-m" and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        if word.startswith("-n") and word[2:].lstrip("=").isdigit():  # -n4 and -n=4
            options += ["-n", word[2:].lstrip("=")]
            continue
        options.append(word)
        if word not in FLAGS and "=" not in word and rest:
            options.append(rest.pop(0))
    return options, rest


def run(arguments: RunArguments) -> int:
    """Start the workers, wait for all, name each failure, and return the exit status.

    Returns:
        0 if all succeeded, the last time each was started; 1 if any failed, or could not save its
        last checkpoint; 128 + the signal that ended the run (130 on Ctrl+C). A kill of --faults is
        no failure if another worker here succeeded.
    """
    from gossipdp.launcher.launch_plan import inherited_variables
    from gossipdp.launcher.local import Spares
    from gossipdp.launcher.supervisor import Failure, Supervisor, shown_rank
    from gossipdp.observe.log import worker_file, write_process_end

    environment.check_platform()
    # Options are checked before a port is taken.
    num_workers = _num_workers(arguments)
    script = _script(arguments)
    place = arguments.tls or os.environ.get("GOSSIPDP_TLS")
    tls = Tls(Path(place)) if place else None
    fault_plan = _fault_plan(arguments, num_workers)
    secret = read_secret(arguments.secret_file)
    given = {**os.environ, **_common_variables(arguments, num_workers)}
    plan = _plan(arguments, num_workers // arguments.nproc_per_replica, tls, secret)
    others_may_join = plan.first_rank == 0 and bool(secret or tls)
    num_shown = -1
    inherited, log_dir = inherited_variables(given), given.get("GOSSIPDP_LOG_DIR")
    num_spares = min(arguments.spares, arguments.max_restarts) * arguments.nproc_per_replica
    spares = Spares(script, inherited, num_spares, _tell)

    def tell(failure: Failure) -> None:
        goes_on = bool(supervisor.running) or plan.others_elsewhere
        then = "the others go on" if goes_on else "no other worker runs here"
        if not supervisor.begun:
            joins = "the workers that were to join are ended; those of the run are not"
            then = joins if arguments.join else "the run had not begun, so all are ended"
        if failure.is_injected:
            then = f"that was --faults, and {then}"
        _tell(f"worker {shown_rank(failure.rank)} {failure.ending.reason}; {then}")
        if log_dir and failure.rank >= 0:
            path = worker_file(Path(log_dir), failure.rank)
            write_process_end(path, failure.process_id, failure.ending.reason)

    def look() -> None:
        nonlocal num_shown
        spares.follow(supervisor)
        known = [network.addresses for network in plan.join_infos]
        if others_may_join and num_shown < plan.num_meetings and all(known):
            num_shown = plan.num_meetings
            _tell(_join_line(arguments, [each[min(each)] for each in known]))

    faults = None
    if fault_plan is not None:
        num_drawn = plan.world_size or plan.num_local
        faults = FaultInjector(fault_plan, num_drawn, seed=arguments.faults_seed, say=_tell)
        if fault_plan.kills and not arguments.max_restarts:
            _tell("--faults kills workers, and without --max-restarts they stay away")
    supervisor = Supervisor(
        plan,
        lambda own: spares.start({**inherited, **own}),
        max_restarts=arguments.max_restarts,
        faults=faults,
        on_failure=tell,
        on_sentence=_tell,
    )
    if not plan.launcher_variables:
        noun = "worker" if num_workers == 1 else "workers"
        _tell(f"starting {num_workers} {noun}; importing torch takes some seconds")
    code = 1
    try:
        code = _end(supervisor, supervisor.run(look))
    finally:  # also after an error: under torchrun others may wait for this one's end
        spares.close()
        wait = plan.under_torchrun and code == 1 and supervisor.begun
        if wait:
            _tell("staying until the other workers have ended: torchrun would end them with this")
        if lost := plan.leave(wait=wait):
            ranks = ", ".join(map(str, lost))
            _tell(f"not waiting for the end of workers {ranks}: nothing is heard of them")
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    if "torch" in sys.modules:
        # Nothing is left to do. To end torch, or an import of it that still runs, would take long.
        os._exit(code)
    return code


def _end(supervisor: "Supervisor", ended_by: int | None) -> int:
    """Say how the run ended, after this signal if one ended it; return the exit status."""
    from gossipdp.launcher.supervisor import describe, shown_rank

    code = (1 if supervisor.failures else 0) if ended_by is None else 128 + ended_by
    if ended_by is not None:
        num_workers, has_ended = len(supervisor.workers), supervisor.is_complete
        _tell(stopped_line(supervisor.saved, num_workers, has_ended=has_ended))
    if supervisor.failures and supervisor.begun:  # the lines about them may be hours old
        _tell(f"at the end: {describe(supervisor.failures)}")
    if supervisor.loss and ended_by is None:
        _tell(supervisor.loss)
    for rank, reason in sorted(supervisor.unsaved.items()):
        code = 1
        _tell(f"worker {shown_rank(rank)}: {reason}")
    return code


def stopped_line(
    saved: Mapping[int, tuple[int, str]], num_workers: int, *, has_ended: bool = False
) -> str:
    """Return the line on a run that was stopped, from each worker's (step, directory) if it saved.

    ``has_ended``: a worker had the run's average before.
    """
    steps = sorted(step for step, _ in saved.values())
    places = sorted({directory for _, directory in saved.values()})
    if not steps:
        return f"stopped{' after the end of the run' * has_ended}; nothing more was saved"
    at = f"step {steps[0]}" if steps[0] == steps[-1] else f"steps {steps[0]} to {steps[-1]}"
    if len(saved) < num_workers:
        at += f", which {len(saved)} of {num_workers} workers saved"
    return f'stopped at {at}; start it again with resume="auto" to go on from {", ".join(places)}'


def _join_line(arguments: RunArguments, addresses: Sequence[tuple[str, int]]) -> str:
    shown = ",".join(environment.show_address(*each) for each in addresses)
    noun = "worker" if len(addresses) == 1 else "replica"
    words = [f"to add a {noun}: gossipdp run --join {shown}"]
    words += [f"--nproc-per-replica {len(addresses)}"] if len(addresses) > 1 else []
    for name in ("secret_file", "tls", "log_dir"):
        value = getattr(arguments, name)
        words += [] if value is None else [f"--{name.replace('_', '-')} {value}"]
    return " ".join([*words, "SCRIPT"])


def _num_workers(arguments: RunArguments) -> int:
    number, num_shards = arguments.workers, arguments.nproc_per_replica
    if number is None and arguments.join is not None:
        return num_shards
    if number is None and num_shards > 1:
        raise ValueError(
            "--nproc-per-replica needs -n. Under torchrun or srun shard over one dimension of a "
            "device mesh and give the other: GossipDataParallel(..., mesh=mesh['replicate'])"
        )
    if number is None:
        if "RANK" not in environment.with_torchrun_names(os.environ):
            raise ValueError(
                "-n is missing: say how many workers to start. Options come before the script, as "
                "in gossipdp run -n 4 train.py: what follows the script is the script's"
            )
        return 1
    if number % num_shards:
        raise ValueError(
            f"-n is {number}; it counts processes, and must be a multiple of --nproc-per-replica, "
            f"here {num_shards}"
        )
    return number


def _common_variables(arguments: RunArguments, num_workers: int) -> dict[str, str]:
    """Return variables of all workers here: their share of the cores, and addresses."""
    num_local = num_workers
    if arguments.workers is None and arguments.join is None:  # the launcher has others here
        num_local = environment.Environment.read().local_world_size or 1
    is_on_several = arguments.workers is None or arguments.rendezvous or arguments.join
    given = {
        # A worker that joins hears who else is on its host, and then takes its share.
        "OMP_NUM_THREADS": None if arguments.join else num_threads(num_local),
        "GOSSIPDP_HOST": arguments.host if is_on_several else None,
        "GOSSIPDP_TLS": arguments.tls and arguments.tls.absolute(),
        "GOSSIPDP_LOG_DIR": arguments.log_dir and arguments.log_dir.absolute(),
        "GOSSIPDP_STATUS_PORT": arguments.status_port,
        "GOSSIPDP_STATUS_HOST": arguments.status_host,
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def _plan(
    arguments: RunArguments, num_local: int, tls: Tls | None, secret: str | None
) -> "LaunchPlan":
    """Build the launch plan: a run on this host or on several, or workers that join one."""
    from gossipdp.launcher.launch_plan import LaunchPlan, ask_join_infos

    num_shards = arguments.nproc_per_replica
    several = arguments.nnodes != 1 or arguments.rendezvous is not None
    if arguments.join is not None:
        if several:
            raise ValueError(
                "--join needs none of --nnodes, --node-rank and --rendezvous: the workers of the "
                "run know the others"
            )
        addresses = environment.read_addresses("--join", arguments.join)
        if secret is None and tls is None:
            raise ValueError(
                "--join needs the --secret-file (or GOSSIPDP_SECRET), or the --tls, with which "
                "the run was started; a run that was started without cannot be joined"
            )
        networks = ask_join_infos(addresses, num_shards, tls)
        return LaunchPlan(num_local, secret=secret, join_infos=networks)
    if arguments.workers is None:
        if several or arguments.node_rank:
            raise ValueError(
                "--nnodes, --node-rank and --rendezvous need -n; without it the launcher of this "
                "process says the rank and where the workers meet"
            )
        return LaunchPlan.launched(os.environ, secret)
    host, port = arguments.host or "127.0.0.1", 0
    if not several and arguments.node_rank:
        raise ValueError("--node-rank without --nnodes; say how many hosts there are")
    if several:
        addresses = environment.read_addresses("--rendezvous", arguments.rendezvous or "")
        if len(addresses) != 1:
            raise ValueError(
                "several hosts need one --rendezvous HOST:PORT, the same on all, with an address "
                "of host 0 and a free port there"
            )
        ((host, port),) = addresses
    if several and secret is None and tls is None and not environment.is_loopback(host):
        raise ValueError(
            f"several hosts need a secret: everyone who reaches {host}:{port} could take part in "
            "the run. Give the same --secret-file on all hosts (openssl rand -hex 16 > FILE; chmod "
            "600 FILE), or --tls with what gossipdp tls-init makes"
        )
    return LaunchPlan.on_hosts(
        num_local,
        (host, port),
        secret,
        num_hosts=arguments.nnodes,
        host_rank=arguments.node_rank,
        num_shards=num_shards,
    )


def _fault_plan(arguments: RunArguments, num_processes: int) -> FaultPlan | None:
    if arguments.faults is None:
        return None
    num_workers: int | None = num_processes // arguments.nproc_per_replica * arguments.nnodes
    if arguments.join is not None:
        num_workers = None
    elif arguments.workers is None:
        num_workers = environment.Environment.read().world_size
    return FaultPlan.parse(arguments.faults, num_workers)


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
    """Read ``--secret-file``, without one GOSSIPDP_SECRET; return None if neither is given.

    Raises:
        ValueError: the file cannot be read, is open to everybody, or holds too little.
    """
    if path is None:
        secret, name = os.environ.get("GOSSIPDP_SECRET") or None, "GOSSIPDP_SECRET"
    else:
        name = f"--secret-file {path}"
        try:
            secret = path.read_text("utf-8-sig").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = "is not UTF-8 text"
            if isinstance(error, OSError):
                reason = f"cannot be read: {error.strerror}"
            raise ValueError(f"{name} {reason}; name a file with a long random text") from None
        check_private("--secret-file", path)
    if secret is not None:
        environment.check_secret(secret.encode(), name)
    return secret


def _tell(text: str) -> None:
    with suppress(OSError):  # a full disk under the log ends no run
        sys.stderr.write(f"gossipdp: {text}\n")
        sys.stderr.flush()
