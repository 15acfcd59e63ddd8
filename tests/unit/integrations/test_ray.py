import sys
from collections.abc import Iterator

import pytest

from gossipdp.errors import RendezvousError
from gossipdp.integrations.ray import Meeting, launch
from gossipdp.launcher.environment import Environment
from gossipdp.launcher.store import connect, ready_key


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting(3, "127.0.0.1")
    yield made
    made.close()


def all_begin(first: Environment) -> None:
    store = connect(first, 10)
    for rank in range(3):
        store.set(ready_key(first.key_prefix, rank), "1")
    store.get(ready_key(first.key_prefix, 2))  # set() does not wait until the store has it


def test_first_starts_meet_at_the_store(meeting: Meeting) -> None:
    environments = [Environment.read(meeting.variables(rank)) for rank in range(3)]
    assert [environment.rank for environment in environments] == [0, 1, 2]
    assert not any(environment.is_joining for environment in environments)
    assert {environment.local_rank for environment in environments} == {0}
    assert not meeting.has_begun()
    all_begin(environments[0])
    assert meeting.has_begun()


def test_a_second_start_joins_the_others_by_their_latest_addresses(meeting: Meeting) -> None:
    first = [Environment.read(meeting.variables(rank)) for rank in range(3)]
    all_begin(first[0])
    meeting.note_addresses({0: ("10.0.0.1", 1), 1: ("10.0.0.2", 2), 2: ("10.0.0.3", 3)})
    again = Environment.read(meeting.variables(1))
    assert (again.rank, again.num_restarts) == (1, 1)
    assert set(again.join) == {("10.0.0.1", 1), ("10.0.0.3", 3)}
    assert (again.run_id, again.secret) == (first[1].run_id, first[1].secret)
    assert Environment.read(meeting.variables(1)).num_restarts == 2


def test_a_death_before_all_have_begun_is_the_runs(meeting: Meeting) -> None:
    meeting.variables(2)
    with pytest.raises(RendezvousError, match="worker 2 died before all workers had begun"):
        meeting.variables(2)


def test_without_ray_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'gossipdp\[ray\]'"):
        launch(print, 1)
