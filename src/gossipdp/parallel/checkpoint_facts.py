"""What a checkpoint says of itself."""

import msgspec

from gossipdp.protocol.progress import ProgressEntry


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint says of itself, as JSON in its metadata.

    ``generation`` counts the numbers of workers that the run has had: files of a lower one were
    merged into those of the next. ``step`` numbers this worker's gradient steps and names the
    file; ``steps`` and ``samples`` are what this worker has done itself, in all of its lives.
    ``progress`` holds every life that it knew of, which together make the progress of the run.
    ``run_id`` and ``incarnation`` name the life that saved, and ``ended`` those that it knew to
    have ended, as :mod:`~gossipdp.parallel.outlived` says; allreduce has but one life a rank.
    """

    rank: int
    num_workers: int
    generation: int
    method: str
    step: int
    steps: int
    samples: int
    progress: tuple[ProgressEntry, ...]
    gossipdp: str
    run_id: str = ""
    incarnation: int = 0
    ended: tuple[tuple[int, int], ...] = ()
