"""The progress counter."""

import pytest

from gossipdp.protocol.progress import Progress, ProgressEntry


def test_totals_are_over_all_lives_of_all_workers() -> None:
    progress = Progress(rank=0, incarnation=1, process_id=11)
    progress.add(samples=32)
    progress.add(samples=32, steps=2)
    progress.merge(ProgressEntry(1, 1, 5, samples=10, steps=1))
    progress.merge(ProgressEntry(1, 2, 6, samples=20, steps=2))
    assert (progress.total_samples, progress.total_steps) == (94, 6)
    assert (progress.worker_samples(1), progress.worker_steps(1)) == (30, 3)
    assert (progress.worker_samples(0), progress.worker_steps(0)) == (64, 3)
    assert progress.by_rank() == {0: (64, 3), 1: (30, 3)}


def test_an_older_entry_changes_nothing() -> None:
    progress = Progress(0, 1, 11)
    assert progress.merge(ProgressEntry(1, 1, 5, samples=10, steps=4))
    version = progress.version
    assert not progress.merge(ProgressEntry(1, 1, 5, samples=9, steps=3))
    assert progress.version == version
    assert progress.total_samples == 10


def test_news_is_what_changed_since() -> None:
    progress = Progress(0, 1, 11)
    progress.add(samples=1)
    entries, version = progress.news()
    assert entries == (ProgressEntry(0, 1, 11, 1, 1),)
    assert progress.news(version) == ((), version)
    progress.merge_all(entries)
    assert progress.news(version) == ((), version)
    progress.add(samples=1)
    assert progress.news(version)[0] == (ProgressEntry(0, 1, 11, 2, 2),)


def test_progress_cannot_be_taken_back() -> None:
    with pytest.raises(ValueError, match="samples=-1"):
        Progress(0, 1, 11).add(samples=-1)


def test_a_new_incarnation_counts_from_zero_and_keeps_what_was_counted() -> None:
    progress = Progress(0, 1, 11)
    progress.add(samples=5)
    progress.renew(2)
    progress.add(samples=7)
    assert progress.news()[0] == (ProgressEntry(0, 1, 11, 5, 1), ProgressEntry(0, 2, 11, 7, 1))
    assert progress.total_samples == 12
    with pytest.raises(ValueError, match="from 2 to 1"):
        progress.renew(1)


def test_samples_of_this_process_are_no_others_after_it_was_renewed() -> None:
    progress = Progress(1, 0, 7)
    progress.add(10)
    progress.merge_all([ProgressEntry(0, 0, 5, 100, 1), ProgressEntry(1, 0, 6, 1000, 1)])
    assert progress.others_samples == 1100
    progress.renew(1)
    progress.add(20)
    # Another process of the same rank is another.
    assert progress.others_samples == 1100
    assert progress.total_samples == 1130
