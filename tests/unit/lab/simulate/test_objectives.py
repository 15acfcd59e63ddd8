import pickle

import pytest
import torch

from gossipdp_lab.simulate.module_objective import digits_objective
from gossipdp_lab.simulate.objectives import Consensus, Quadratic


def test_eigenvalues_are_spaced_evenly_in_their_logarithms():
    source = Quadratic(dimension=5, mu=0.01, smoothness=1.0).begin(3, 0)
    assert source.eigenvalues.tolist() == pytest.approx([0.01, 10**-1.5, 0.1, 10**-0.5, 1.0])
    assert Quadratic(mu=0, smoothness=0).begin(3, 0).eigenvalues.abs().max() == 0
    assert Quadratic(heterogeneity=1.0).begin(1, 0).drifts.abs().max() == 0
    assert source.start.dtype == torch.float64
    assert source.start.shape == (3, 5)


def test_the_mean_gradient_is_the_derivative_of_the_loss_and_drifts_are_added():
    objective = Quadratic(4, 0.5, 2.0, noise_variance=0.0, heterogeneity=3.0)
    source = objective.begin(3, 2)
    x = torch.randn(4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = source.gradients(range(3), x.expand(3, 4)).values
    mean = found.mean(dim=0)
    torch.testing.assert_close(found - mean, source.drifts)
    assert float(source.drifts.square().sum()) / 3 == pytest.approx(3.0)
    step = 1e-6 * torch.eye(4, dtype=torch.float64)
    slopes = [
        (source.evaluate(x + each).loss - source.evaluate(x - each).loss) / 2e-6 for each in step
    ]
    assert mean.tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-7)
    assert source.evaluate(source.optimum).loss == 0


def test_noise_has_its_variance_and_each_rank_its_own():
    source = Quadratic(50, noise_variance=4.0).begin(2, 0)
    x = source.optimum.expand(2, 50)
    noise = torch.stack([source.gradients([0, 1], x).values for _ in range(2000)])
    squared_norms = noise.square().sum(dim=2)
    # The squared norm's own deviation is 4 sqrt(2 / 50) = 0.8; over 2000 draws, 0.018.
    assert squared_norms.mean(dim=0).tolist() == pytest.approx([4.0, 4.0], abs=0.09)
    # 200,000 values of deviation sqrt(4 / 50).
    assert noise.mean().abs() < 5 * (4 / 50 / 200_000) ** 0.5
    correlation = (noise[:, 0] * noise[:, 1]).sum(dim=1).mean() / 4.0
    assert abs(correlation) < 5 / (2000 * 50) ** 0.5


def test_gradients_of_a_rank_do_not_depend_on_the_others():
    objective = Quadratic(30, heterogeneity=1.0)
    together, apart = objective.begin(4, 7), objective.begin(4, 7)
    x = torch.ones(4, 30, dtype=torch.float64)
    for _ in range(200):
        values = together.gradients([0, 1, 2, 3], x).values
    for rank in (3, 1, 0, 2):
        for _ in range(200):
            alone = apart.gradients([rank], x[:1]).values
        torch.testing.assert_close(alone[0], values[rank], rtol=0, atol=0)


@pytest.mark.parametrize(
    "objective",
    [Consensus(5), Quadratic(5), digits_objective(batch_size=8)],
    ids=lambda objective: objective.name,
)
def test_every_objective_runs_from_its_seed_alone(objective):
    objective = pickle.loads(pickle.dumps(objective))
    first, same, other = (objective.begin(3, seed) for seed in (0, 0, 1))
    assert torch.equal(first.start, same.start)
    if not objective.has_gradients:
        assert not torch.equal(first.start, other.start)
        return
    x = first.start
    values = [source.gradients([2, 0], x[[2, 0]]).values for source in (first, same, other)]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    evaluation = first.evaluate(x[0])
    assert (evaluation.metric is None) == (objective.metric_name is None)
    assert evaluation.loss > 0
