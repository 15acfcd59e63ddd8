"""``launch`` on a Ray cluster: every worker is an actor, and Ray restarts actors that die."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gossipdp.errors import RendezvousError, WorkerFailedError
from gossipdp.integrations import needed_from
from gossipdp.launcher.launch_plan import LaunchPlan
from gossipdp.launcher.reports import ReportChannel, report_variables
from gossipdp.rules import at_least_0, at_least_1

logger = logging.getLogger("gossipdp")


def launch(
    function: Callable[..., Any],
    world_size: int = 4,
    args: Sequence[Any] = (),
    *,
    max_restarts: int = 0,
    actor_options: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Call ``function(*args)`` on ``world_size`` Ray actors; return their results by rank.

    Ray must have been started (``ray.init()``). The store is kept by one more actor, without a
    core of its own.

    Args:
        function: called in every worker; as for :func:`gossipdp.launch`.
        world_size: how many actors.
        args: what each call is given.
        max_restarts: how often Ray starts each worker again whose process died after all had begun
            to train. It calls the function again and joins those that go on. An exception is
            not a death: that worker has failed.
        actor_options: for Ray's ``options()`` of each worker, such as ``{"num_gpus": 1}``; without
            ``num_cpus`` it is one core a worker.

    Raises:
        WorkerFailedError: a worker failed, and was not started again. Before all had begun to
            train that ends the others; after that they go on, and it is raised when all have
            ended.
        ValueError: no workers, or fewer than no restarts.
        ModuleNotFoundError: Ray is not installed.
    """
    at_least_1("world_size", world_size)
    at_least_0("max_restarts", max_restarts)
    ray = _import_ray()
    meeting = ray.remote(Meeting).options(num_cpus=0).remote(world_size)
    options = {"num_cpus": 1, **(actor_options or {})}
    options |= {"max_restarts": max_restarts, "max_task_retries": max_restarts}
    actors = [ray.remote(_Worker).options(**options).remote() for _ in range(world_size)]
    calls = {
        actor.work.remote(meeting, rank, function, tuple(args)): rank
        for rank, actor in enumerate(actors)
    }
    results: dict[int, Any] = {}
    failures: dict[int, Exception] = {}
    try:
        waiting = list(calls)
        while waiting:
            (ended,), waiting = ray.wait(waiting, num_returns=1)
            rank = calls[ended]
            try:
                results[rank] = ray.get(ended)
            except ray.exceptions.RayError as error:
                failures[rank] = error
                # Threads that it left running would make it count as alive to the others.
                ray.kill(actors[rank])
                # If it is lost with its node, go on, since workers that wait for it fail.
                with suppress(ray.exceptions.RayActorError):
                    if not ray.get(meeting.has_begun.remote()):
                        break
    finally:
        for actor in [*actors, meeting]:
            ray.kill(actor)
    if failures:
        texts = [f"worker {rank} failed:\n{error}" for rank, error in sorted(failures.items())]
        raise WorkerFailedError("\n\n".join(texts))
    return [results[rank] for rank in range(world_size)]


def _import_ray() -> Any:
    # Imported when it is used, since the meeting itself works without Ray.
    with needed_from("ray"):
        import ray
        import ray.util
    return ray


class Meeting:
    """The actor that keeps the store of one run, and the latest addresses for restarted workers.

    Args:
        num_workers: of the run.
        host: an address of this machine that the workers reach; by default this Ray node's.

    Raises:
        RendezvousError: the address is not of this machine.
    """

    def __init__(self, num_workers: int, host: str | None = None) -> None:
        host = host or _import_ray().util.get_node_ip_address()
        self._plan = LaunchPlan.on_hosts(num_workers, (host, 0))
        self._plan.open()
        self._num_starts = [0] * num_workers

    def variables(self, rank: int) -> dict[str, str]:
        """Return the variables of a worker that starts; from its second start on, to join.

        Raises:
            RendezvousError: it starts again, but the run had not begun.
        """
        num_restarts = self._num_starts[rank]
        self._num_starts[rank] += 1
        if num_restarts and not self.has_begun():
            raise RendezvousError(
                f"worker {rank} died before all workers had begun to train; look at its output"
            )
        lives = (rank, num_restarts) if num_restarts else None
        own = self._plan.worker_variables(rank, rejoins=lives)
        # Ray gives each worker devices of its own, and says nothing of others on its host. The file
        # with addresses may be on another one.
        del own["LOCAL_WORLD_SIZE"], own["GROUP_RANK"]
        return own | {"LOCAL_RANK": "0", "GOSSIPDP_JOIN_FILE": ""}

    def has_begun(self) -> bool:
        """Return whether all workers have met and train."""
        assert self._plan.hosted is not None
        return self._plan.hosted.have_all_begun()

    def note_addresses(self, addresses: Mapping[int, tuple[str, int]]) -> None:
        """Note the addresses of the live workers, as one of them reports."""
        self._plan.join_infos[0].addresses = dict(addresses)


class _Worker:
    def work(
        self, meeting: Any, rank: int, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> Any:
        channel = ReportChannel()
        os.environ.update(_import_ray().get(meeting.variables.remote(rank)))
        os.environ.update(report_variables(channel.sender))

        def pass_on() -> None:
            while True:
                select.select([channel.receiver], [], [])
                for report in channel.take():
                    if report.addresses is not None:
                        meeting.note_addresses.remote(report.addresses)
                    if report.unsaved is not None:
                        logger.error("%s", report.unsaved)

        threading.Thread(target=pass_on, name="gossipdp reports", daemon=True).start()
        return function(*args)
