"""Real workers mix as fast as theory says, conserve the mean, and mix their optimizers' moments."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_run import patient
from torch import Tensor, nn
from waiting import wait_until

from gossipdp import Counting, Exchange, GossipDataParallel
from gossipdp.graph import Constants, build_graph

pytestmark = pytest.mark.processes

NUM_WORKERS = 4
NUM_FLOATS = 3_000
# A "gradient step" is a wait that changes nothing.
NUM_STEPS, STEP_S = 80, 0.01
AGREED = 1e-6


def start_vector(rank: int) -> torch.Tensor:
    return torch.randn(NUM_FLOATS, generator=torch.Generator().manual_seed(rank))


def mix(meeting):
    """Exchange with the others while waiting; return what was seen at first and at each step."""
    torch.set_num_threads(1)
    vector = nn.ParameterDict({"vector": nn.Parameter(torch.zeros(NUM_FLOATS))})
    optimizer = torch.optim.SGD(vector.parameters(), lr=0.0)  # no gradient: it changes nothing
    # Strict: each step brings its exchanges on a busy machine too.
    options = {"exchange": Exchange(pace="strict"), "counting": Counting(samples_per_step=1)}
    model = GossipDataParallel(
        vector, optimizer, graph="ring", comm_rate=2.0, network=patient(), **options
    )
    # Wrapping gave all of them rank 0's vector. No worker asks before its fifth step, and none
    # steps before all have vectors of their own.
    model.load_state_dict({"vector": start_vector(model.rank)})
    (meeting / str(model.rank)).touch()
    wait_until(lambda: len(list(meeting.iterdir())) == model.world_size, "all come to the start")
    values = vector["vector"].detach()
    seen, initiated, times_s = [values.numpy().copy()], [0], [time.monotonic()]
    for _ in range(NUM_STEPS):
        time.sleep(STEP_S)
        optimizer.step()
        times_s.append(time.monotonic())
        seen.append(values.numpy().copy())
        initiated.append(model.stats().exchanges_initiated)
    assert model.stats().exchanges_failed == 0
    model.consolidate()  # all have ended their exchanges when it returns
    arrays = {"times_s": times_s, "values": seen, "initiated": initiated}
    history = {name: np.array(series) for name, series in arrays.items()}
    return SimpleNamespace(rank=model.rank, stats=model.stats(), **history)


def test_workers_start_apart_and_agree_on_the_mean_of_their_starts(workers, tmp_path):
    series = workers(mix, NUM_WORKERS, (tmp_path,))
    starts = np.stack([start_vector(rank).numpy() for rank in range(NUM_WORKERS)])
    for rank, each in enumerate(series):
        assert each.rank == rank
        assert np.array_equal(each.values[0], starts[rank])
        # Nobody asks before it knows its own pace: all had their vectors by then.
        assert not each.initiated[:4].any()
    # Both ends count an exchange, but for one that the end of the run may cut short.
    answered = sum(each.stats.exchanges_answered for each in series)
    asked = sum(each.stats.exchanges_initiated for each in series)
    assert abs(answered - asked) <= NUM_WORKERS
    decay, lowest = decay_per_exchange(series)
    assert lowest < AGREED
    # Theory's bound holds for the expectation; single runs decay one to two times as fast.
    assert decay > 0.8 * Constants.of(build_graph("ring", NUM_WORKERS)).a2cid2_decay_bound
    # Exchanges and flow conserve the mean of x + c/2, and c goes where the differences go.
    np.testing.assert_allclose(series[0].values[-1], starts.mean(axis=0), atol=1e-2)


def decay_per_exchange(series: list[Any]) -> tuple[float, float]:
    """Return the decay of the consensus distance per exchange, and its least share of the first."""
    moments = np.arange(
        max(each.times_s[0] for each in series), min(each.times_s[-1] for each in series), STEP_S
    )
    places = [np.searchsorted(each.times_s, moments, side="right") - 1 for each in series]
    both = list(zip(series, places, strict=True))
    values = np.stack([each.values[place] for each, place in both]).astype(np.float64)
    shares = np.square(values - values.mean(axis=0)).sum(axis=(0, 2))
    shares /= shares[0]
    agreed_at = int(np.argmax(shares < AGREED))
    initiated = sum(each.initiated[place][[0, agreed_at]] for each, place in both)
    per_worker = 2.0 * float(initiated[1] - initiated[0]) / len(series)
    # Two rounds of disjoint pairs make four workers exactly equal.
    share = max(shares[agreed_at], np.finfo(np.float32).eps ** 2)
    return float(-np.log(share) / per_worker), float(shares.min())


def train(choice: Any) -> tuple[Tensor, Tensor, int]:
    """Return the moments, parameters and failed exchanges; data differ in size between workers."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 700), nn.ReLU(), nn.Linear(700, 900))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, betas=(0.9, 0.98))
    options = {"exchange": Exchange(moments=choice, pace="strict"), "network": patient()}
    model = GossipDataParallel(net, optimizer, graph="complete", **options)
    torch.manual_seed(model.rank)
    for _ in range(60):
        optimizer.zero_grad()
        model(torch.randn(8, 16) * (1.0 + model.rank)).square().mean().backward()
        optimizer.step()
        time.sleep(0.005)  # leaves the other worker time, as a GPU would
    model.consolidate()
    moments = [optimizer.state[each]["exp_avg_sq"].flatten() for each in net.parameters()]
    parameters = [each.detach().flatten() for each in net.parameters()]
    return torch.cat(moments), torch.cat(parameters), model.stats().exchanges_failed


def spread(results: Any) -> float:
    """Return the standard deviation over workers as a share of their mean, over coordinates."""
    held = torch.stack([each for each, _, _ in results]).double()
    return float(held.std(dim=0).mean() / held.mean())


def test_second_moments_of_workers_with_different_data_come_together(workers):
    both = workers(lambda: (train(False), train({"exp_avg_sq": 1})), 2)
    apart, results = zip(*both, strict=True)
    assert spread(apart) > 0.5
    # In 60 steps of beta2 = 0.98 each worker's own data make 70% of what it would hold alone.
    assert spread(results) < 0.2 * spread(apart)
    for moments, parameters, num_failed in results:
        assert (moments >= 0).all()
        assert moments.isfinite().all()
        assert torch.equal(parameters, results[0][1])
        assert num_failed == 0
