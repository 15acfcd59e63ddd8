"""The plans of ``--faults``: what texts mean, and that a plan is a function of text and seed."""

import re
from itertools import islice, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipdp.launcher.faults import Clause, Event, FaultPlan


@pytest.mark.parametrize(
    ("text", "clause"),
    [
        ("kill", Clause("kill")),
        ("kill 3 at 9s", Clause("kill", 3, 9.0)),
        (" Kill  AT 2m 0 ", Clause("kill", 0, 120.0)),
        ("kill every 1.5h", Clause("kill", time_s=5400.0, every=True)),
        ("stop 8s", Clause("stop", for_s=8.0)),
        ("stop 2 for 500ms every 2m", Clause("stop", 2, 120.0, True, for_s=0.5)),
        ("slow 4x every 30s", Clause("slow", time_s=30.0, every=True, factor=4.0)),
        ("slow 2.5x 1 at 3s for 10s", Clause("slow", 1, 3.0, for_s=10.0, factor=2.5)),
    ],
)
def test_what_a_clause_means(text, clause):
    assert FaultPlan.parse(text).clauses == (clause,)


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
    """Return the first events of a clause."""
    return list(islice(plan.clauses[number].events(number, num_workers, seed), 10))


def test_a_period_is_over_before_the_first_event():
    plan = FaultPlan.parse("kill 1 every 3s; stop 1s 0 at 6s; slow 2x 2", num_workers=3)
    events = [[(each.at_s, each.ranks) for each in first(plan, n, 3)] for n in range(3)]
    assert events == [[(3.0 * n, (1,)) for n in range(1, 11)], [(6, (0,))], [(0, (2,))]]


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
