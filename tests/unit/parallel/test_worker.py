"""The pace of ``pace="strict"``, what a worker of several lives has trained, and its state."""

import dataclasses
import os
from contextlib import closing, nullcontext
from copy import deepcopy
from itertools import chain, count, repeat
from random import Random
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from checkpointing import step, steps_saved
from clocks import Clock
from torch import nn
from waiting import wait_until

from gossipdp import logs
from gossipdp.dynamics.state import State
from gossipdp.errors import PoisonedError, SupersededError
from gossipdp.gossip.counters import Counters
from gossipdp.gossip.joining import RunEndingError
from gossipdp.gossip.sums import Outcome
from gossipdp.launcher import rendezvous
from gossipdp.launcher.environment import UNKNOWN_RANK, Environment
from gossipdp.launcher.reports import ReportChannel, report_variables
from gossipdp.parallel import entry, pace
from gossipdp.parallel.checkpoint import Counts, file_path
from gossipdp.parallel.options import Exchange, Network, Options
from gossipdp.parallel.pace import MAX_LAG, Pace
from gossipdp.parallel.shards import Agreed
from gossipdp.parallel.training_state import capture
from gossipdp.parallel.worker import Worker
from gossipdp.protocol.members import Member, Progress, ProgressEntry, Status
from gossipdp.protocol.messages import Accept, ExchangeId, Members, Propose
from gossipdp.protocol.neighbours import Fresh
from gossipdp.protocol.pairing import Pairing

ASKED = ExchangeId(0, 0, 1)  # worker 0's exchange, whose end serves none of this worker's demands


@pytest.mark.parametrize(
    "events",
    [
        {
            2: lambda pairing: pairing.finished(ASKED),
            4: lambda pairing: pairing.receive(0, Accept(pairing.state.id, 0.5)),
            6: lambda pairing: pairing.finished(pairing.state.id),
        },
        {3: Pairing.close},  # it is poisoned meanwhile
    ],
)
def test_strict_pace_waits_until_a_demand_is_served(monkeypatch, events):
    """By turn of the gossip thread, which a pause gives it; the last event ends the wait."""
    pairing = Pairing(rank=1, incarnation=0, policy=Fresh(Random(0)), alpha_tilde=0.5)
    pairing.set_available({0: 1.0})
    pairing.receive(0, Propose(ASKED, 0.5))
    for _ in range(MAX_LAG + 1):
        pairing.tick()
    clock, turns, taken = Clock(), count(1), []

    def pause(seconds):
        clock.now_s += seconds
        events.get(next(turns), lambda _: None)(pairing)

    def take():
        taken.append(clock.now_s)
        assert len(taken) < 10, "it waits for ever"

    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=clock, sleep=pause))
    protocol = SimpleNamespace(pairing=pairing, neighbours=frozenset({0}))
    thread = SimpleNamespace(steps_behind=0, check=lambda: None)
    paced = Pace(Options(exchange=Exchange(pace="strict")))
    paced.wait(protocol, thread, take)
    assert len(taken) == max(events)
    assert paced.waited_s == taken[-1] == pytest.approx(max(events) * pace.TURN_WHILE_WAITING_S)


def test_strict_pace_waits_a_time_out_for_a_first_link_and_for_no_lost_one(monkeypatch):
    clock, turns = Clock(longest_s=1.0), []
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=clock, sleep=clock.sleep))
    pairing = SimpleNamespace(answers=True, available={}, backlog=MAX_LAG)
    thread = SimpleNamespace(steps_behind=1, check=lambda: turns.append("check"))
    options = Options(exchange=Exchange(pace="strict"), network=Network(timeout_s=0.005))
    paced = Pace(options)
    for neighbours, num_turns in (((), 0), ((0,), 3), ((0,), 3)):
        protocol = SimpleNamespace(pairing=pairing, neighbours=frozenset(neighbours))
        paced.wait(protocol, thread, take=lambda: turns.append("take"))
        assert turns == num_turns * ["check", "take"]
    pairing.available = {0: 1.0}
    Pace(options).wait(protocol, thread, take=pairing.available.clear)
    assert turns[6:] == ["check"]


@pytest.mark.parametrize(
    ("num_steps", "num_due", "num_served", "is_low"),
    [
        (199, 100, 0, False),  # links may be coming up
        (200, 100, 75, True),
        (200, 100, 76, False),
        (200, 19, 0, False),  # rare exchanges: too few to tell
        (200, 20, 0, True),
    ],
)
def test_a_low_rate_is_told_once(monkeypatch, caplog, *, num_steps, num_due, num_served, is_low):
    clock = Clock(100.0)
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=clock))
    paced, counters = Pace(Options(comm_rate=2.0)), Counters(exchanges_initiated=num_served)
    for clock.now_s, num_told in ((159.0, 0), (160.0, is_low), (161.0, is_low)):
        paced.warn_if_low(SimpleNamespace(num_ticks=num_due, counters=counters), 3, num_steps)
        assert len(caplog.messages) == num_told


def test_the_rate_of_a_worker_that_does_not_wait_is_looked_at_after_each_step(linear, monkeypatch):
    model, optimizer = linear(comm_rate=1.0)
    monkeypatch.setattr(model._worker._pace, "warn_if_low", looks := Mock())
    step(model, optimizer, times=2)
    assert [each.args[1:] for each in looks.call_args_list] == [(0, 1), (0, 2)]


def test_an_exchange_counts_for_both_of_its_ends(linear):
    worker = linear()[0]._worker
    snapshot = dataclasses.replace(worker._loop.snapshot, counters=Counters(exchanges_initiated=3))
    loop = worker._loop
    worker._loop = SimpleNamespace(snapshot=snapshot, transfers=loop.transfers, close=loop.close)
    worker._gradient_steps = 4
    assert worker.stats().achieved_comm_rate == 1.5


@pytest.mark.parametrize(
    ("num_workers", "method", "chosen"),
    [(3, "a2cid2", "gossip"), (4, "a2cid2", "a2cid2"), (3, "none", "none")],
)
def test_a_complete_graph_takes_no_momentum(wrap_sgd, monkeypatch, num_workers, method, chosen):
    """A ring of three is one, where exchanges would leave it at zero; one of four is not."""
    dropped = []
    monkeypatch.setattr(State, "drop_momentum", lambda _: dropped.append(True))
    worker = wrap_sgd(nn.Linear(2, 2), method=method, graph="ring")[0]._worker
    dropped.clear()
    worker._take_place(num_workers - 1, num_workers, incarnation=0)
    assert (worker._method, bool(dropped)) == (chosen, chosen != method)
    assert (worker.phase._speed > 0) == (method == "a2cid2")
    worker._take_place(0, 1, incarnation=0)


@pytest.mark.parametrize(
    ("statuses", "lead"),
    [("ALIVE ALIVE ALIVE", 0), ("DEAD DONE ALIVE", 1), ("LEFT JOINING ALIVE", 2)],
)
def test_the_lead_is_the_live_worker_of_the_lowest_rank(linear, monkeypatch, statuses, lead):
    worker = linear()[0]._worker
    members = tuple(Member(rank, 0, 70, Status[n]) for rank, n in enumerate(statuses.split()))
    snapshot = dataclasses.replace(worker._loop.snapshot, members=members)
    monkeypatch.setattr(worker, "_loop", SimpleNamespace(snapshot=snapshot, poisoned=None))
    leads = []
    for rank in range(lead, len(members)):
        monkeypatch.setattr(worker, "rank", rank)
        leads += [rank] if logs._is_lead() else []  # as asked before a warning about the run
    assert leads == [lead]


class Counting(Worker):
    """As much of a worker as counts, of what it has ``_heard``."""

    def __init__(self) -> None:
        self.before, self.replica = Counts(), SimpleNamespace(is_sharded=False)

    def train(self, samples: int) -> None:
        self._gradient_steps += 1
        self._samples += samples
        self._heard.add(samples)

    def _own_view(self, samples: int = 0) -> Agreed:
        return Agreed(samples, self._heard.others_samples)


def test_who_takes_another_rank_counts_what_it_trained_under_the_first_once():
    worker, before = Counting(), Progress(3, 11)
    before.merge_all([ProgressEntry(1, 50, 80, 8), ProgressEntry(2, 60, 7, 1)], 0.0)
    worker.rank, worker._heard = 3, before
    for samples in (10, 20):
        worker.train(samples)
    taken, given_up = SupersededError("another process has this rank"), []

    def join() -> None:
        if len(given_up) == 1:  # the next rank is taken too
            raise taken
        assert worker.rank == 3, "it joins once"
        worker.rank, worker._heard = 4, Progress(4, 12)
        worker._heard.merge_all(before.news()[0], 0.0)

    worker._give_up_rank, worker._join_once = given_up.append, join
    worker._rendezvous, logged = SimpleNamespace(mark_ready=lambda rank: None), []
    worker.monitoring = SimpleNamespace(come_again=lambda: logged.append(worker.rank))
    worker.come_again(taken)
    worker.train(5)
    assert (worker.rank, logged, given_up) == (4, [4], [taken, taken])
    assert worker.total_samples() == 80 + 7 + 30 + 5 == worker._heard.total_samples
    assert worker.counts() == Counts(step=1, steps=1, samples=5)
    assert worker._heard.by_rank() == {1: (80, 8), 2: (7, 1), 3: (30, 2), 4: (5, 1)}


def test_a_replica_joins_under_a_rank_that_was_its_own_for_a_time_out(monkeypatch):
    """Another has the first, as it hears after 0.9 s. Its processes count on from one number."""
    worker, clock, looks, joined, given_up = Counting(), Clock(), count(), [], []
    worker.rank, worker._network, worker.before = 3, SimpleNamespace(timeout_s=1.0), Counts(9, 2, 5)
    disputed, ranks = SupersededError("another process has rank 3"), []

    def check() -> None:
        assert next(looks) < 100, "it does not pause"
        if len(joined) == 1 and clock.now_s > 0.85:
            raise disputed

    worker._thread, worker._rendezvous = SimpleNamespace(check=check), SimpleNamespace(joins=True)
    worker.replica = SimpleNamespace(is_sharded=True, first_says=lambda own: own or 4)
    worker.replica.gather = lambda *of: ((own, 5) for own in of)  # the other process's are 5
    worker._join, worker._give_up_rank = lambda: joined.append(clock.now_s), given_up.append
    worker._share_cores = lambda: ranks.append(worker._environment.rank)
    monkeypatch.setattr(entry, "time", SimpleNamespace(monotonic=clock, sleep=clock.sleep))
    joiner = Environment(UNKNOWN_RANK, num_shards=2, join=(("10.0.0.1", 9),), unique_run_id=True)
    for shard in (0, 1):  # the second joins when it hears of the rank
        worker._environment = dataclasses.replace(joiner, shard=shard)
        worker.start()
    assert (given_up, ranks, worker.before) == ([disputed], [3, 4], Counts(9, 5, 5))
    assert joined == pytest.approx([0.0, 0.9, 1.9], abs=0.11)


def test_all_but_rank_0_begin_with_its_state_unless_the_run_resumes(linear, monkeypatch):
    worker, took = linear()[0]._worker, []
    monkeypatch.setattr(worker, "_meet", lambda: None)
    monkeypatch.setattr(entry, "take_state", lambda *_, **how: took.append((worker.rank, how)))
    saved = SimpleNamespace(tensors=worker.capture())
    for rank, resumption in ((2, None), (1, None), (1, saved), (0, None)):
        worker.resumption = resumption
        worker._environment = Environment(rank=rank, world_size=rank + 1)
        worker._call(worker._loop.hold)
        worker.start()
        assert worker._protocol.pairing.answers
    assert took == [(2, {"is_start": True}), (1, {"is_start": True})]
    assert saved.tensors == {}, "a second copy is let go"


@pytest.mark.usefixtures("at_once")
def test_one_that_joins_goes_on_after_the_newest_file_of_its_rank(linear, monkeypatch, tmp_path):
    """In a resumed run an earlier life may have saved after the steps that the others know of."""
    model, optimizer = linear(tmp_path, 2)
    step(model, optimizer, times=3)
    worker, found = model._worker, []
    answer = Members(1, is_ending=False, members=(Member(0, 2, 7, restarts=2),), progress=())
    taken = deepcopy(capture(worker.optimizers))
    monkeypatch.setattr(entry, "ask_members", lambda *_, **__: answer)
    monkeypatch.setattr(entry, "take_state", lambda *_, **__: taken)
    monkeypatch.setattr(worker, "_listening", lambda: nullcontext((None, "127.0.0.1")))
    monkeypatch.setattr(worker, "_start_thread", lambda *_, **__: None)
    worker._secret = b"of this test"
    for rank, saved in ((0, 2), (0, 9), (UNKNOWN_RANK, 9)):
        file_path(tmp_path, 0, saved).touch()
        worker._environment = Environment(rank=rank, join=(("127.0.0.1", 9),), unique_run_id=True)
        worker._call(worker._loop.hold)
        optimizer.param_groups[0]["lr"] = 0.7
        worker._join_once()
        assert worker._protocol.pairing.answers
        assert optimizer.param_groups[0]["lr"] == 0.1
        found.append((worker.rank, worker.incarnation, worker._restarts, worker.before))
    again = 0, 3, 3
    assert found == [(*again, Counts(3, 3, 3)), (*again, Counts(9, 3, 3)), (1, 0, 0, Counts())]
    monkeypatch.setattr(entry, "has_ended", lambda *_: True)
    for restarts, error, text in ((0, RunEndingError, "has ended while"), (1, SystemExit, "^0$")):
        worker._environment = dataclasses.replace(worker._environment, num_restarts=restarts)
        with pytest.raises(error, match=text):
            worker._join()


def test_only_the_first_model_of_a_script_says_where_to_join_it(wrap_sgd, monkeypatch):
    monkeypatch.setattr(rendezvous, "_numbers", count())
    with closing(ReportChannel()) as channel:
        for name, value in report_variables(channel.sender).items():
            monkeypatch.setenv(name, value)
        first, second = (wrap_sgd(nn.Linear(2, 2))[0]._worker for _ in range(2))
        looked = (first._loop, second._loop)
        wait_until(lambda: all(loop._reported for loop in looked), "both look at their addresses")
        for worker in (first, second):
            worker._call(int)  # after that turn of its thread
        addresses = [each.addresses for each in channel.take() if each.addresses]
        second.consolidate()
        first.consolidate()
        assert [each.consolidated for each in channel.take() if each.consolidated] == [True]
    own = first._protocol.membership.own
    assert addresses == 2 * [{0: (own.host, own.port)}]  # as it met, and from its thread


@pytest.fixture
def refused_once(monkeypatch):
    """Refuse the next call, as to a joiner whose rank was taken; return the mock ``come_again``."""

    def refuse(worker, place, name, come_again=None):
        answers = chain([SupersededError("taken")], repeat(DEFAULT))
        came = Mock(side_effect=come_again)
        monkeypatch.setattr(place, name, Mock(side_effect=answers, wraps=getattr(place, name)))
        monkeypatch.setattr(worker, "come_again", came)
        return came

    return refuse


@pytest.mark.parametrize("when", ["as it asks", "while it waits", "as it stops the run"])
def test_a_joiner_whose_rank_was_taken_averages_or_stops_under_another(linear, refused_once, when):
    model = linear()[0]
    worker = model._worker
    place, name = (worker._thread, "check") if when == "while it waits" else (worker, "_call")
    before = [each.clone() for each in model.parameters()]
    came = refused_once(worker, place, name)
    if when == "as it stops the run":
        model.stop()
        assert worker._protocol.progress.is_stopped
    else:
        with model.averaged():
            assert all(map(torch.equal, model.parameters(), before))
    came.assert_called_once()


@pytest.mark.usefixtures("at_once")
def test_a_joiner_whose_rank_was_taken_saves_under_another(linear, monkeypatch, tmp_path, caplog):
    """At once if it is asked to; one that is due gives way to the step that takes a rank."""
    model, optimizer = linear(tmp_path, 1, keep=9)
    worker, came, check = model._worker, [], Mock()

    def come_again(error):
        came.append(worker.step_number)
        check.side_effect = None

    monkeypatch.setattr(worker._thread, "check", check)
    monkeypatch.setattr(worker, "come_again", come_again)
    step(model, optimizer)
    check.side_effect = taken = SupersededError("another process has rank 0")
    assert model.save_checkpoint() == file_path(tmp_path, 0, 1)
    assert (came, steps_saved(tmp_path)) == ([1], [1])
    check.side_effect = taken
    step(model, optimizer)
    assert caplog.messages == ["another process has rank 0"]
    assert (came, model.stats().checkpoints_failed) == ([1, 1], 1)
    step(model, optimizer)
    assert (came, steps_saved(tmp_path)) == ([1, 1], [2, 1])


def test_a_joiner_whose_rank_was_taken_keeps_what_it_loads(linear, refused_once):
    """To take another rank brings a live worker's values, and the state of its optimizers."""
    model, optimizer = linear()
    first = next(model.parameters())
    optimizer.state[first]["momentum_buffer"] = torch.full_like(first, 5.0)
    worker = model._worker

    def come_again(error: SupersededError) -> None:
        for parameter in model.parameters():
            parameter.data.fill_(9.0)
        optimizer.state[first]["momentum_buffer"].fill_(9.0)
        optimizer.param_groups[0]["lr"] = 9.0

    came = refused_once(worker, worker._loop, "hold", come_again)
    for chunk in worker._state.chunks:
        chunk.pending.fill_(1.0)
        chunk.restored()
    loaded = {name: torch.full_like(value, 7.0) for name, value in model.state_dict().items()}
    model.load_state_dict(loaded)
    came.assert_called_once()
    torch.testing.assert_close(dict(model.state_dict()), loaded)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.state[first]["momentum_buffer"].eq(5.0).all()


def test_where_another_shard_is_poisoned_no_process_of_the_replica_averages(linear, monkeypatch):
    model, _ = linear()
    worker = model._worker
    monkeypatch.setattr(worker.replica, "gather", lambda own: iter([(own, True)]))
    message = "the parameters of another shard of replica 0 hold NaN or infinity: look at"
    with pytest.raises(PoisonedError, match=message), model.averaged():
        pass
    assert not worker.is_closed
    with pytest.raises(PoisonedError, match=message):
        model.consolidate()
    assert worker.is_closed, "the others wait for it no longer"


def test_all_values_of_the_average_take_the_place_of_the_own(wrap_sgd, monkeypatch):
    """Parameters, statistics, and a counter that is the lead's."""
    model, _ = wrap_sgd(nn.BatchNorm1d(2))
    worker, chunks = model._worker, model._worker._state.all_chunks
    values = [torch.full_like(chunk.x, number) for number, chunk in enumerate(chunks, 3)]
    outcome = Outcome(values, 1, {}, consensus_distance=0.5, lead=0)
    monkeypatch.setattr(worker, "_wait_for_average", lambda timeout_s: outcome)
    assert model.consolidate().consensus_distance == 0.5
    assert [chunk.x.unique().tolist() for chunk in chunks] == [[3.0], [4.0], [5.0]]


def test_a_joiner_that_loads_before_its_first_step_is_told_so(linear, monkeypatch, caplog):
    """As a script that loads its last weights after wrapping, whenever it is started again."""
    model, optimizer = linear()
    state = model.state_dict()
    model.load_state_dict(state)
    monkeypatch.setattr(rendezvous.Rendezvous, "joins", True)
    model.load_state_dict(state)
    step(model, optimizer)
    model.load_state_dict(state)
    assert caplog.text.count("load them into the module before you wrap it") == 1


@pytest.mark.parametrize(("shards", "given", "threads"), [(1, 6, 4), (1, 2, 2), (2, 6, 2)])
def test_one_that_joins_takes_its_share_of_its_host(wrap_sgd, monkeypatch, shards, given, threads):
    """It has 8 cores, beside a live worker; a dead one and one elsewhere count for nothing."""
    worker, told = wrap_sgd(nn.Linear(2, 2))[0]._worker, []
    own = worker._protocol.membership.own
    others = [(Status.ALIVE, own.host), (Status.ALIVE, "10.0.0.9"), (Status.DEAD, own.host)]
    members = [own, *(Member(1, 0, 5, *each) for each in others)]
    monkeypatch.setattr(worker, "_call", lambda function: members)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(worker.replica, "environment", Environment(num_shards=shards))
    monkeypatch.setattr(torch, "get_num_threads", lambda: given)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    worker._share_cores()
    assert told == [threads]


def test_a_checkpoint_holds_every_chunk_at_one_phase(wrap_sgd, monkeypatch):
    monkeypatch.setattr("gossipdp.parallel.flat_parameters.chunk_bytes_for", lambda *_, **__: 4096)
    monkeypatch.setattr(State, "drop_momentum", lambda _: None)  # as one worker alone does
    worker = wrap_sgd(nn.Linear(64, 64), method="a2cid2", graph="ring")[0]._worker
    chunks = worker._state.averaged_chunks
    assert len(chunks) >= 3
    theta, generator = 1.25, torch.Generator().manual_seed(0)
    expected = {"model": [], "c": []}
    for index, chunk in enumerate(chunks):
        chunk.theta = chunk.theta_c = 0.3 * index
        for part in (chunk.x, chunk.pending, chunk.c):
            part.copy_(torch.randn(part.shape, generator=generator))
        chunk.has_pending = True
        x, pending, c = (each.double() for each in (chunk.x, chunk.pending, chunk.c))
        left = torch.tensor(-2.0 * (theta - chunk.theta), dtype=torch.float64).exp()
        expected["model"].append(x + pending + 0.5 * (1.0 - left) * c)
        expected["c"].append(left * c)
    monkeypatch.setattr(worker, "_theta", lambda: theta)
    captured = worker.capture()
    for kind, values in expected.items():
        held = [captured[f"{kind}/{name}"].double().flatten() for name in ("weight", "bias")]
        torch.testing.assert_close(torch.cat(held), torch.cat(values), rtol=0.0, atol=1e-6)
    for chunk in chunks:
        chunk._reset()
    worker._flat.restore(captured)  # as of a worker that goes on
    monkeypatch.setattr(worker, "_theta", lambda: 0.0)
    torch.testing.assert_close(worker.capture(), captured, rtol=0.0, atol=0.0)


def test_a_worker_of_16_bits_goes_on_with_what_its_parameters_have_no_bits_for(wrap):
    net = nn.Linear(8, 8).bfloat16()
    worker = wrap(net, torch.optim.SGD(net.parameters(), 0.1), method="gossip")._worker
    (chunk,) = worker._state.averaged_chunks
    chunk.pending.copy_(torch.randn(chunk.pending.shape).mul_(1e-3))
    expected = net.weight.detach().float() + chunk.pending[:64].view(8, 8)
    captured = worker.capture()
    chunk._reset()
    worker._flat.restore(captured)
    assert torch.equal(captured["model/weight"], expected)
    assert torch.equal(net.weight, expected.bfloat16())
    assert torch.equal(worker.capture()["model/weight"], expected)
    assert chunk.has_pending
