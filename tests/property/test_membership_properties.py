"""Progress is a join: each process counts by its largest, whatever the order of merges."""

from hypothesis import given
from hypothesis import strategies as st

from gossipdp.protocol.members import Progress, ProgressEntry

entries = st.builds(
    ProgressEntry,
    rank=st.integers(0, 2),
    process_id=st.integers(0, 1),
    samples=st.integers(0, 9),
    steps=st.integers(0, 9),
    is_stopped=st.booleans(),
)

additions = st.tuples(st.integers(0, 9), st.integers(0, 2), st.booleans())


@given(st.lists(st.one_of(entries, entries, additions), max_size=40))
def test_progress_is_the_largest_count_of_each_process_after_every_event(events):
    """Process 1 of rank 0 counts itself; a rank stepped when one of its counts grew."""
    progress = Progress(0, 1)
    largest: dict[tuple[int, int], list[int]] = {}
    stepped_at: dict[int, float] = {}
    for now, event in enumerate(events, start=1):
        version, (_, since) = progress.version, progress.news()
        process, own = (0, 1), largest.get((0, 1), [0, 0, 0])
        if isinstance(event, ProgressEntry):
            process = event.rank, event.process_id
            found = [event.samples, event.steps, event.is_stopped]
            known = largest.get(process)
            new = list(map(max, known, found)) if known else found
            is_new = process != (0, 1) and new != known
            progress.merge_all([event], now)
        else:
            samples, steps, is_stopped = event
            known, is_new = largest.get(process), True
            new = [own[0] + samples, own[1] + steps, own[2] or is_stopped]
            progress.add(samples, steps, now, is_stopped=is_stopped)
        if is_new:
            if known is None or new[1] > known[1]:
                stepped_at[process[0]] = now
            largest[process] = new
        told = [ProgressEntry(*process, *new[:2], bool(new[2]))] if is_new else []
        assert list(progress.news(since)[0]) == told
        assert (progress.version > version) == is_new
        assert progress.total_samples == sum(samples for samples, _, _ in largest.values())
        assert progress.total_steps == sum(steps for _, steps, _ in largest.values())
        assert progress.others_samples == progress.total_samples - largest.get((0, 1), [0])[0]
        assert progress.is_stopped == any(is_stopped for _, _, is_stopped in largest.values())
        assert progress.stepped_at == stepped_at
        assert progress.by_rank() == {
            rank: tuple(
                sum(counts[i] for (other, _), counts in largest.items() if other == rank)
                for i in (0, 1)
            )
            for rank in {rank for rank, _ in largest}
        }
