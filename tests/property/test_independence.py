"""One worker misbehaves: the others exchange as if it were not there."""

import pytest
from exploring import SEED
from hypothesis import example, given, settings
from hypothesis import strategies as st
from misbehaving import WHATS, WINDOW_S, Course, Event, watch

# A worker that has one neighbour left may find it taken: on a ring of four the two neighbours of
# the bad one share the fourth, which makes at most 1.5 times its own rate.
LEAST = {("ring", 4): 0.5}
GRAPHS = [("complete", 3), ("complete", 4), ("ring", 4), ("ring", 6), ("exponential", 8)]
# By chance one worker's exchanges in 4 s vary by 6%, with the bad one and without: by 3 times 8%
# at the worst of many examples. Twice the time leaves that within the bound.
LASTS_S = 4.0 if SEED is None else 8.0


def course_of(course: Course) -> str:
    lines = [f"{rank}: {course.seen[rank]} of {course.removed[rank]}" for rank in course.others]
    return "\n".join([f"exchanges by windows of {WINDOW_S} s, {course.event}", *lines])


@settings(max_examples=6 if SEED is None else 60)
@given(
    what=st.sampled_from([what for what in WHATS if what != "bad link"]),
    graph=st.sampled_from(GRAPHS),
    comm_rate=st.sampled_from([0.5, 1.0, 2.0, None]),
    begins_s=st.sampled_from([2.0, 3.5, 5.0]),
    seed=st.integers(0, 2**32),
)
@example(what="stop", graph=("complete", 4), comm_rate=1.0, begins_s=4.0, seed=0)
@example(what="slow 16", graph=("complete", 3), comm_rate=None, begins_s=4.0, seed=0)
@example(what="held", graph=("complete", 3), comm_rate=1.0, begins_s=4.0, seed=0)
@example(what="first step", graph=("ring", 4), comm_rate=1.0, begins_s=4.0, seed=0)
def test_the_others_exchange_as_if_it_were_not_there(what, graph, comm_rate, *, begins_s, seed):
    event = Event(what, graph[1] - 1, begins_s, LASTS_S)
    course = watch(*graph, event, comm_rate=comm_rate, seed=seed, after_s=3.0)
    ends_s = begins_s + LASTS_S
    few = 0.1 if comm_rate == 0.5 else 0.0  # some twenty exchanges each: chance moves them
    assert course.share(begins_s + WINDOW_S, ends_s) > 0.88 - few, course_of(course)
    least = LEAST.get(graph, 0.8)
    assert course.least_share(begins_s + WINDOW_S, ends_s) > least - few, course_of(course)
    if what != "poisoned":
        assert course.share(ends_s + 1.0, ends_s + 3.0) > 0.88 - few, course_of(course)


@pytest.mark.parametrize("comm_rate", [1.0, None])
def test_a_bad_link_costs_three_exchanges(comm_rate):
    """Each neighbour has three that take a second; then that worker rests."""
    event = Event("bad link", 2, 2.0, 20.0)
    course = watch("complete", 3, event, comm_rate=comm_rate, after_s=0.0)
    assert course.share(9.0, 22.0) > 0.9, course_of(course)
    assert course.share(2.5, 7.0) < 0.5, "else the event was none"
