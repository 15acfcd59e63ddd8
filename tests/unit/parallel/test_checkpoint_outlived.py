"""Which checkpoints the run has left behind, and what a resumed run makes of them."""

import msgspec
import pytest
import torch

from gossipdp.launcher.environment import Environment
from gossipdp.parallel import checkpoint
from gossipdp.parallel.checkpoint import BEFORE_THIS_RUN, ENDS_WITHIN_S, Facts, Resumption, saved_in
from gossipdp.parallel.checkpoint_files import write_tensors
from gossipdp.parallel.options import Checkpoints
from gossipdp.parallel.shards import Replica
from gossipdp.protocol.actions import Notice
from gossipdp.protocol.members import Member, Progress, ProgressEntry, Status


def heard_of(rank: int, samples: int) -> ProgressEntry:
    """Return what is known of a worker, in steps of 8."""
    return ProgressEntry(rank, 70 + rank, samples, samples // 8)


def facts(rank: int, samples: int, **changes: object) -> Facts:
    """Return the facts of a worker that knows of its own samples alone."""
    steps, heard = samples // 8, (heard_of(rank, samples),)
    plain = Facts(rank, 2, steps, steps, samples, heard, gossipdp="", run_id="first")
    return msgspec.structs.replace(plain, **changes)


def test_lives_that_ended_long_enough_ago_are_named():
    members = [
        Member(0, 2, 70, Status.ALIVE),  # of this rank's own earlier lives, two have ended
        Member(1, 0, 71, Status.ALIVE),
        Member(2, 0, 72, Status.DEAD),
        Member(3, 1, 73, Status.DEAD),
        Member(4, 3, 74, Status.JOINING),
        Member(5, 0, 75, Status.DEAD),
        Member(6, 0, 76, Status.LEFT),
    ]
    now_s = 1000.0
    notices = [
        Notice(2, "lost", now_s - ENDS_WITHIN_S),
        Notice(5, "lost", now_s - 3 * ENDS_WITHIN_S),
        Notice(5, "restarted", now_s - 2 * ENDS_WITHIN_S),
        Notice(5, "lost", now_s - 0.9 * ENDS_WITHIN_S),
        Notice(4, "lost", now_s - 2 * ENDS_WITHIN_S),
    ]
    # 3 died before this worker could notice.
    assert checkpoint.ended_lives(members, notices, now_s) == ((0, 1), (2, 0), (3, 1), (4, 2))


HALF, OTHER_HALF = facts(0, 3200, ended=((1, 0),)), facts(1, 3000, ended=((0, 0),))
AGAIN = facts(1, 3000, incarnation=1)
CARRIED = facts(0, 3200, run_id="third", ended=((1, BEFORE_THIS_RUN),))


@pytest.mark.parametrize(
    ("all_facts", "expected"),
    [
        ([HALF, facts(1, 80)], {1}),
        ([facts(0, 3200), facts(1, 80)], set()),  # slow, not dead
        ([HALF, AGAIN], set()),  # a later life of the same rank counts
        ([facts(0, 3200, ended=((1, 1),)), AGAIN], {1}),
        ([facts(0, 80, ended=((1, 0),)), facts(1, 3200)], set()),  # an older one has no say
        ([HALF, OTHER_HALF], set()),  # both halves of a cut network count
        # A third that died within a half is left behind, whatever the other half thinks of it.
        ([facts(0, 3200, ended=((1, 0), (2, 0))), OTHER_HALF, facts(2, 80, ended=((1, 0),))], {2}),
        # A death in the resumed run outlives the checkpoint it resumed from.
        ([facts(0, 3200, run_id="second", ended=((1, 0),)), facts(1, 80, incarnation=3)], {1}),
        # What earlier runs left behind stays so, until that rank saves again.
        ([CARRIED, facts(1, 80, incarnation=3)], {1}),
        ([CARRIED, facts(1, 3000, run_id="third")], set()),
        # That the old run called rank 0 dead does not matter to the new one's.
        ([CARRIED, facts(1, 80, incarnation=3, ended=((0, 0),))], {1}),
    ],
)
def test_checkpoints_of_the_dead_are_left_behind(all_facts, expected):
    assert checkpoint.outlived({each.rank: each for each in all_facts}) == expected


def save(directory, facts: Facts, value: float) -> None:
    """Save a model of ``value``, a momentum of 2, and a learning rate of ``value``."""
    path = checkpoint.file_path(directory, facts.rank, facts.step)
    path.parent.mkdir(parents=True, exist_ok=True)
    model = {"model/w": torch.full((3,), value), "c/w": torch.full((3,), 2.0)}
    model["model/queue"] = torch.full((2,), value)
    write_tensors(path, *checkpoint.encode(model, facts, {"optimizers": [], "rate": value}))


def damage(directory, rank: int, step: int) -> None:
    path = checkpoint.file_path(directory, rank, step)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # of its values: its facts can be read
    path.write_bytes(data)


def resumed(directory, rank: int, world_size: int) -> Resumption | None:
    replica = Replica(Environment(rank=rank, world_size=world_size))
    layout = checkpoint.layout_of({"w": torch.ones(3), "queue": torch.ones(2)})
    saving = Checkpoints(directory, resume="auto")
    return checkpoint.find_resumption(saving, layout, {"w"}, replica)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_only_the_progress_of_what_is_left_behind_is_taken(tmp_path, caplog, world_size):
    save(tmp_path, facts(0, 80, world_size=1, run_id="alone"), 9.0)  # before it joined these two
    save(tmp_path, facts(0, 3200, ended=((1, 0),)), 100.0)
    save(tmp_path, facts(1, 80), -1.0)
    for rank in range(world_size):
        resumption = resumed(tmp_path, rank, world_size)
        is_own = rank == 0 and world_size == 2
        assert resumption.is_own == is_own
        assert (resumption.tensors["model/w"] == (100.0 if is_own else 101.0)).all()
        assert resumption.training["rate"] == 100.0
        assert resumption.counts.step == 400, "so that the next files are the newest"
        assert {entry.rank: entry.samples for entry in resumption.progress} == {0: 3200, 1: 80}
        assert resumption.ended == ((1, BEFORE_THIS_RUN),)
        assert resumption.counts.steps == (400 if rank == 0 else 0)
    assert "step-00000010.safetensors is passed over: its worker died" in caplog.text


@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
def test_with_another_number_of_workers_all_start_from_one_mean(tmp_path, world_size):
    """Each worker's file counts once, with z = x + c/2."""
    values = (0.1, 1e7, 3.3)
    for rank, value in enumerate(values):
        save(tmp_path, facts(rank, 80 + 8 * rank, world_size=3), value)
    mean = (torch.tensor(values).double().sum() / 3 + 1.0).float()
    for rank in range(world_size):
        resumption = resumed(tmp_path, rank, world_size)
        assert (resumption.tensors["model/w"] == mean).all(), "bit for bit on all"
        assert resumption.tensors.keys() == {"model/w", "model/queue"}, "without momentum"
        assert (resumption.tensors["model/queue"] == torch.tensor(values[rank % 3])).all()
        assert resumption.training["rate"] == values[rank % 3], "never averaged"
        assert resumption.counts.steps == (10 + rank if rank < 3 else 0)
        assert (resumption.counts.step, resumption.num_means) == (12, 1)
        assert not resumption.is_own
        assert resumption.start == "from the mean of checkpoints of 3 workers"


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_mean_counts_the_samples_of_the_files_that_are_in_it(tmp_path, caplog, world_size):
    """Not those of a damaged one, whose facts can be read; others had heard of these steps."""
    save(tmp_path, facts(0, 800, progress=(heard_of(0, 800), heard_of(1, 240))), 3.0)
    save(tmp_path, facts(1, 80), 1.0)
    save(tmp_path, facts(1, 160), 5.0)
    damage(tmp_path, 1, 20)
    for rank in range(world_size):
        resumption = resumed(tmp_path, rank, world_size)
        assert (resumption.tensors["model/w"] == 3.0).all(), "the mean of 3 + 1 and 1 + 1"
        totals = Progress(rank, 99)
        totals.merge_all(resumption.progress, 0.0)
        assert totals.by_rank() == {0: (800, 100), 1: (80, 10)}
        assert resumption.counts.step == 100
    assert "its checksum does not fit" in caplog.text


def test_who_has_no_whole_file_goes_on_from_the_next_and_after_the_last_from_the_first(tmp_path):
    for rank in range(3):
        save(tmp_path, facts(rank, 80, world_size=3), float(rank))
    for rank in (0, 2):
        damage(tmp_path, rank, 10)
    assert [resumed(tmp_path, rank, 3).training["rate"] for rank in range(3)] == [1.0, 1.0, 1.0]


def test_files_that_are_in_the_mean_count_no_more(tmp_path):
    """Three go on from it, and one saves nothing. A worker that has joined knows of no mean."""
    for rank in range(4):
        save(tmp_path, facts(rank, 800, world_size=4, num_means=int(rank > 0)), 1.0)
    save(tmp_path, facts(0, 880, run_id="second", num_means=2, world_size=3), 2.0)
    save(tmp_path, facts(1, 880, run_id="second", world_size=3), 3.0)
    assert {rank: len(saved) for rank, saved in saved_in(tmp_path).items()} == {0: 1, 1: 1}
    for rank in range(3):
        again, more = (resumed(tmp_path, rank, world_size) for world_size in (3, 4))
        assert (again.is_own, again.num_means) == (rank < 2, 2)
        assert (more.is_own, more.num_means) == (False, 3)
        assert (more.tensors["model/w"] == 3.5).all()
    assert (again.tensors["model/w"] == 3.5).all()


def test_the_file_of_a_worker_that_had_joined_is_not_averaged_into_a_later_run(tmp_path):
    """A run of as many as began goes on without it, and is resumed by more much later."""
    for rank in range(3):
        save(tmp_path, facts(rank, 800), 1.0)
    ended = resumed(tmp_path, 0, 2).ended
    for rank in range(2):
        save(tmp_path, facts(rank, 8000, run_id="second", ended=ended), 3.0)
    for rank in range(3):
        assert (resumed(tmp_path, rank, 3).tensors["model/w"] == 4.0).all()


@pytest.mark.parametrize(("ended", "counted"), [((), 80), (((1, 0),), 160)])
def test_steps_after_a_checkpoint_count_only_if_their_worker_has_ended(tmp_path, ended, counted):
    """If it goes on from the file, they are lost; if it had ended, exchanges had brought them."""
    save(tmp_path, facts(0, 3200, progress=(heard_of(0, 3200), heard_of(1, 160)), ended=ended), 1.0)
    save(tmp_path, facts(1, 80, progress=(heard_of(0, 3216), heard_of(1, 80))), -1.0)
    for rank in range(2):
        totals = Progress(rank, 99)
        totals.merge_all(resumed(tmp_path, rank, 2).progress, 0.0)
        assert totals.by_rank() == {0: (3200, 400), 1: (counted, counted // 8)}
