"""The plans of ``--faults``, and the faults that are done to workers, by the clock of the test."""

import re
import signal
from itertools import islice, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipdp.launcher.faults import Clause, Event, FaultInjector, FaultPlan, FaultRecord

KILL, STOP, CONT = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT


@pytest.mark.parametrize(
    ("text", "clause"),
    [
        ("kill 3 at 9s", Clause("kill", 3, 9.0)),
        (" Kill  AT 2m 0 ", Clause("kill", 0, 120.0)),
        ("kill every 1.5h", Clause("kill", time_s=5400.0, every=True)),
        ("stop 2 for 500ms every 2m", Clause("stop", 2, 120.0, True, for_s=0.5)),
        ("slow 4x every 100ms", Clause("slow", time_s=0.1, every=True, factor=4.0)),
    ],
)
def test_what_a_clause_means(text, clause):
    assert FaultPlan.parse(text, num_workers=4).clauses == (clause,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kil 3", "'kil 3': 'kil' is no fault; write kill [RANK] [at TIME | every TIME], or stop"),
        ("kill;;stop 1s", "'': an empty clause; write kill"),
        ("kill; stop 8s 2 at 5", "'stop 8s 2 at 5': '5' after 'at' is no time such as 500ms, 8s"),
        ("kill every", "nothing after 'every' is no time"),
        ("kill -1", "'-1' has no meaning here; write kill [RANK] [at TIME | every TIME]"),
        ("kill 1 2", "'rank' is given twice"),
        ("kill at 1s every 1s", "choose 'at' or 'every'"),
        ("kill every 99ms", "'every' takes at least 100ms"),
        ("kill for 3s", "a kill has no duration"),
        ("kill 3x", "a factor belongs to 'slow'"),
        ("stop 2", "say for how long; write stop DURATION [RANK]"),
        ("stop 0s", "the duration is 0"),
        ("slow 2", "say how many times slower: 4x"),
        ("slow 1x", "above 1x and up to 100x; write slow FACTORx [RANK] [at TIME | every TIME]"),
        ("slow 4x for 0.1ms", "the duration is 0"),
        ("kill 4", "'kill 4': there is no rank 4 among 4 workers; choose 0 to 3"),
    ],
)
def test_a_bad_clause_is_shown_with_the_shape_of_a_right_one(text, message):
    with pytest.raises(ValueError, match=f"^--faults: .*{re.escape(message)}"):
        FaultPlan.parse(text, num_workers=4)


def first(plan: FaultPlan, number: int, num_workers: int, seed: int = 0) -> list[Event]:
    return list(islice(plan.clauses[number].events(number, num_workers, seed), 10))


durations = st.integers(1, 10**7).map(lambda ms: ms / 1000)
ranks = st.none() | st.integers(0, 7)
whens = st.one_of(
    st.fixed_dictionaries({"time_s": st.just(0.0) | durations}),
    st.fixed_dictionaries({"time_s": durations.map(lambda s: s + 0.1), "every": st.just(True)}),
)
factors = st.integers(1001, 10**5).map(lambda thousandths: thousandths / 1000)


@st.composite
def clauses(draw: Any) -> Clause:
    kind = draw(st.sampled_from(["kill", "stop", "slow"]))
    options = draw(whens) | {"rank": draw(ranks)}
    options["time_s"] = round(options["time_s"], 3)
    if kind == "stop":
        options["for_s"] = draw(durations)
    if kind == "slow":
        options |= {"factor": draw(factors), "for_s": draw(st.none() | durations)}
    return Clause(kind, **options)


plans = st.lists(clauses(), min_size=1, max_size=4).map(lambda each: FaultPlan(tuple(each)))


@given(plans)
def test_the_text_of_a_plan_is_that_plan(plan):
    assert FaultPlan.parse(str(plan)) == plan


@given(plans, st.integers(1, 8), st.integers(0, 9))
def test_a_plan_is_a_function_of_text_seed_and_number_of_workers(plan, num_workers, seed):
    again = FaultPlan.parse(str(plan))
    for number, clause in enumerate(plan.clauses):
        events = first(plan, number, num_workers, seed)
        assert first(again, number, num_workers, seed) == events
        assert [event.at_s for event in events] == sorted(event.at_s for event in events)
        assert (len(events) == 1) is not clause.every
        for event in events:
            named = None if clause.rank is None else (clause.rank,)
            assert event.ranks == (named or event.ranks)
            assert sorted(event.ranks) == sorted(named or range(num_workers))
        if clause.rank is None and num_workers > 1:
            assert all(one.ranks[0] != next_.ranks[0] for one, next_ in pairwise(events))


def test_seeds_draw_different_workers():
    plan = FaultPlan.parse("kill every 1s")
    drawn = [[event.ranks for event in first(plan, 0, 6, seed)] for seed in range(3)]
    assert drawn[0] != drawn[1] != drawn[2]


class Scene:
    """Workers without processes, a clock, and the signals that were sent: (seconds, rank, one)."""

    def __init__(self, text: str, num_workers: int = 3, ranks: range | None = None) -> None:
        self.now = self.began_s = 100.0
        self.lines: list[str] = []
        self.sent: list[tuple[float, int, int]] = []
        plan, clock = FaultPlan.parse(text), lambda: self.now
        self.injector = FaultInjector(plan, num_workers, say=self.lines.append, clock=clock)
        self.ranks = ranks or range(num_workers)
        self.running, self.training = set(self.ranks), set(self.ranks)

    def look(self) -> None:
        self.injector.step([Life(self, rank) for rank in self.ranks])

    def at(self, *seconds: float) -> list[tuple[float, int, int]]:
        """Look at these seconds, and return the signals that were sent meanwhile."""
        before = len(self.sent)
        for each in seconds:
            self.now = self.began_s + each
            self.look()
        return self.sent[before:]

    def until(self, seconds: float) -> None:
        """Look now, when the injector wants it, and three milliseconds later than that."""
        end_s = self.began_s + seconds
        self.look()
        while self.now < end_s:
            self.now = min(self.now + self.injector.wait_s() + 0.003, end_s)
            self.look()

    def die(self, rank: int, reason: str = "died of signal 9 (SIGKILL)") -> bool:
        self.running.discard(rank)
        self.training.discard(rank)
        return self.injector.ended(rank, reason)

    def missed(self) -> list[str | None]:
        self.injector.close()
        return [record.missed for record in self.injector.records]


class Life:
    def __init__(self, scene: Scene, rank: int) -> None:
        self.scene, self.rank = scene, rank

    @property
    def runs(self) -> bool:
        return self.rank in self.scene.running

    @property
    def trains(self) -> bool:
        return self.rank in self.scene.training

    def send(self, number: int) -> None:
        assert self.runs, "its process id may be another's by now"
        self.scene.sent.append((round(self.scene.now - self.scene.began_s, 4), self.rank, number))


def test_times_count_from_the_moment_when_all_train():
    scene = Scene("kill 0 at 5s")
    scene.training = {0, 1}
    assert scene.at(0, 20) == []
    assert scene.injector.wait_s() == float("inf")
    scene.training = {0, 1, 2}
    assert scene.at(20, 24.9) == []
    assert scene.injector.wait_s() == pytest.approx(0.1)
    assert scene.at(25.04) == [(25.04, 0, KILL)]
    assert scene.die(0)
    (record,) = scene.injector.records
    assert (record.planned_s, record.at_s, record.clock_s) == (5.0, 5.04, 125.04)
    assert scene.lines == ["  5.0 s  worker 0 killed"]


def test_a_stopped_worker_goes_on_after_its_time():
    scene = Scene("stop 3s 1 at 2s")
    assert scene.at(0, 2, 4.9) == [(2, 1, STOP)]
    assert scene.at(5, 20) == [(5, 1, CONT)]
    assert scene.missed() == [None]
    assert scene.lines == [
        "  2.0 s  worker 1 stopped for 3 s",
        "  5.0 s  worker 1 may go on",
        "faults: 1 done, 0 missed",
    ]


def test_workers_run_on_when_the_run_ends():
    scene = Scene("stop 60s 1; slow 4x 0; slow 4x 2; kill 2 at 9s")
    assert scene.at(0, 0.0124) == [(0, 1, STOP)]
    assert {(rank, number) for _, rank, number in scene.at(0.0125)} == {(0, STOP), (2, STOP)}
    scene.injector.release()
    assert {rank for _, rank, number in scene.sent if number == CONT} == {0, 1, 2}
    assert scene.at(0.5, 10) == []
    assert scene.missed() == [None, None, None, "the run had ended by then"]
    assert scene.lines[-1] == "faults: 3 done, 1 missed"


@pytest.mark.parametrize("factor", [1.5, 4, 50])
def test_a_slow_worker_runs_its_share_of_the_time_in_short_turns(factor):
    scene = Scene(f"slow {factor:g}x 1")
    scene.until(20)
    assert [rank for _, rank, _ in scene.sent] == [1] * len(scene.sent)
    assert all(one[2] != other[2] for one, other in pairwise(scene.sent))
    times = [at_s for at_s, _, number in scene.sent if number == STOP]
    runs = zip(scene.sent[1::2], scene.sent[2::2], strict=False)  # from SIGCONT to SIGSTOP
    ran_s = sum(after[0] - before[0] for before, after in runs)
    assert ran_s / (times[-1] - times[0]) == pytest.approx(1 / factor, rel=0.03)
    turn_s = (times[-1] - times[0]) / (len(times) - 1)
    assert max(0.05, 0.005 * factor) < turn_s < 0.05 + 0.01 * factor
    longest = max(after[0] - before[0] for before, after in pairwise(scene.sent))
    assert longest < 0.5


def test_a_late_turn_is_made_up_for_but_not_at_once():
    scene = Scene("slow 4x 1")
    scene.at(0, 0.0001)
    scene.at(3.0)  # it ran for 3 seconds unseen, and owes 9
    assert scene.sent[-1] == (3.0, 1, STOP)
    assert scene.injector.wait_s() <= 0.5


def test_a_slow_worker_is_fast_again_after_its_time():
    scene = Scene("slow 4x 1 for 2s")
    scene.until(2)
    assert scene.sent[-1][2] == CONT
    assert scene.injector.wait_s() == float("inf")
    assert scene.lines[0] == "  0.0 s  worker 1 4 times slower for 2 s"
    assert scene.lines[1:] == ["  2.0 s  worker 1 at full speed"]


def test_a_slow_machine_stays_slow_after_a_restart():
    scene = Scene("slow 4x 1")
    scene.until(1)
    scene.die(1, "ended with exit code 1")
    scene.until(2)
    scene.running.add(1)
    before = len(scene.sent)
    scene.until(3)
    assert {number for _, _, number in scene.sent[before:]} == {STOP, CONT}


def test_one_that_dies_while_it_is_stopped_gets_no_signal():
    scene = Scene("stop 3s 1")
    scene.at(0)
    scene.die(1)
    assert scene.at(1, 4) == []
    scene.running.add(1)
    assert scene.at(5) == []


def test_a_fault_that_cannot_happen_is_missed_and_says_why():
    text = "slow 2x 3; slow 4x 3 at 1s; stop 9s 0 at 1s; kill 0 at 2s; kill 1 at 2s; kill 1 at 2s"
    scene = Scene(f"{text}; stop 1s 1 at 3s; stop 1s 2 at 3s", num_workers=4)
    scene.at(0, 1, 2)
    assert scene.die(1)
    scene.die(2, "ended with exit code 1")
    scene.running.add(2)
    scene.at(3)
    assert [(record.rank, record.missed) for record in scene.injector.records] == [
        (3, None),
        (3, "it is slow already"),
        (0, None),
        (0, "it is stopped"),
        (1, "it does not run"),
        (1, None),
        (1, "it does not run"),
        (2, "it has been started again and does not train yet"),
    ]
    assert "  3.0 s  no stop of worker 1: it does not run" in scene.lines


def test_a_drawn_worker_that_cannot_is_passed_over():
    scene = Scene("kill every 1s", num_workers=4)
    scene.at(0)
    gone = []
    for count in (1, 2, 3):
        ((_, rank, number),) = scene.at(count)
        assert number == KILL
        assert scene.die(rank)
        gone.append(rank)
    assert len(set(gone)) == 3


def test_the_last_one_is_spared_unless_it_is_named():
    scene = Scene("kill every 1s", num_workers=2)
    scene.at(0, 1)
    # The second event comes before the supervisor has seen the first one's end.
    assert len(scene.at(2)) == 0
    assert "it is the last one that lives here; name" in str(scene.injector.records[-1].missed)
    scene.die(scene.sent[0][1])
    assert scene.at(3) == []
    (left,) = scene.running
    scene.running.add(1 - left)
    assert scene.at(4) == []
    named = Scene("kill 0; kill 1 at 1s", num_workers=2)
    named.at(0)
    named.die(0)
    assert named.at(1) == [(1, 1, KILL)]


def test_a_kill_counts_once_the_process_died_of_it():
    scene = Scene("kill 0; kill 1")
    scene.at(0)
    assert scene.injector.records == []
    assert scene.die(0)
    assert not scene.die(1, "ended with exit code 1")
    assert not scene.die(2)  # another's signal
    assert scene.missed() == [None, "it had ended by itself by then"]
    unseen = Scene("kill 0; kill 1")
    unseen.at(0)
    assert unseen.missed() == 2 * ["it had ended by itself by then"]


def test_events_of_a_time_in_which_the_launcher_stood_still_are_missed():
    scene = Scene("stop 1s every 10s")
    scene.at(0, 35)
    late = "the launcher did not run at that time"
    assert scene.missed() == [late, late, None]


def test_each_host_does_what_befalls_its_own_workers():
    text, done = "slow 2x every 10s for 1s; stop 1s 3 at 5s; stop 1s 0 at 6s", []
    for first in (0, 2):
        scene = Scene(text, 4, range(first, first + 2))
        scene.until(55)
        scene.injector.close()
        assert not any(record.missed for record in scene.injector.records)
        assert {record.rank for record in scene.injector.records} <= set(scene.ranks)
        done += [(record.kind, record.planned_s) for record in scene.injector.records]
    slow = [("slow", 10.0 * count) for count in range(1, 6)]
    assert sorted(done) == sorted([*slow, ("stop", 5.0), ("stop", 6.0)])


def test_each_fault_has_one_record():
    scene = Scene("kill 2 at 1s; slow 4x 3 at 2s for 1s", 4, range(2, 4))
    scene.at(0, 1.25)
    scene.die(2)
    for _ in range(2):
        scene.injector.close()
        assert scene.injector.records == [
            FaultRecord(1.0, 1.25, 2, "kill", clock_s=101.25),
            FaultRecord(2.0, None, 3, "slow", 1.0, 4.0, missed="the run had ended by then"),
        ]
