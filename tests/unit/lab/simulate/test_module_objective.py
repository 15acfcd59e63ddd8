import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from gossipdp_lab.simulate.module_objective import ModuleObjective, RowLayout
from gossipdp_lab.simulate.objectives import Evaluation, Gradients

Batch = tuple[Tensor, Tensor]


class Normalised(nn.Module):
    """A BatchNorm network with a shared weight, a frozen parameter, and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(x)))) * self.frozen


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 3))


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


class Batches:
    """Three batches of a rank, over and over; the last one smaller."""

    sizes = (4, 4, 2)

    def __init__(self, rank: int, num_workers: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        self.batches = [torch.randn(2, size, 3, generator=generator) for size in self.sizes]

    def __iter__(self) -> Iterator[Batch]:
        return iter([(batch[0], batch[1]) for batch in self.batches])


def objective(
    make_model: Callable[[], nn.Module] = Normalised, **options: object
) -> ModuleObjective:
    return ModuleObjective(make_model, squared_error, Batches, **options)  # type: ignore[arg-type]


def rows_of(start: Tensor) -> Tensor:
    return start + 0.1 * torch.randn(start.shape, generator=torch.Generator().manual_seed(5))


def test_a_row_is_parameters_then_float_buffers():
    source = objective().begin(3, seed=1)
    # The shared weight once, BatchNorm's weight and bias; then its two running statistics.
    assert source.num_trained == 9 + 3 + 3
    assert source.start.shape == (3, 15 + 6)
    assert source.start.dtype == torch.float32
    torch.manual_seed(1)
    model = Normalised()
    torch.testing.assert_close(source.start[2, :9], model.first.weight.detach().flatten())
    assert source.start[1, 15:].tolist() == [0, 0, 0, 1, 1, 1]
    layout = RowLayout(model)
    row = torch.arange(21.0)
    layout.write(row, model)
    assert torch.equal(layout.read(model), row)
    assert model.norm.running_var.tolist() == [18, 19, 20]
    assert model.second.weight[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("max_rows", [1, 2, 64])
def test_gradients_and_buffers_are_those_of_the_module(max_rows):
    source = objective(max_rows=max_rows).begin(5, seed=0)
    x = rows_of(source.start)
    before = x.clone()
    layout = RowLayout(Normalised())
    loaders = [iter(Batches(rank, 5, 0)) for rank in range(5)]
    for ranks in ([0, 1, 2, 3, 4], [1, 3, 4], [4, 1, 0]):  # so that batch sizes differ at last
        found = source.gradients(ranks, x[ranks])
        for place, rank in enumerate(ranks):
            model = Normalised()
            layout.write(x[rank], model)
            loss = squared_error(model, next(loaders[rank]))
            loss.backward()
            gradients = [each.grad for each in model.parameters() if each.grad is not None]
            expected = torch.cat([each.flatten() for each in gradients])
            torch.testing.assert_close(found.values[place], expected, rtol=1e-4, atol=1e-5)
            changes = layout.read(model)[15:] - x[rank, 15:]
            torch.testing.assert_close(found.buffer_changes[place], changes)
    assert torch.equal(x, before)


@pytest.mark.parametrize("make_model", [Normalised, dropping])
def test_a_rank_s_gradient_does_not_depend_on_the_ranks_beside_it(make_model):
    together, apart = (objective(make_model).begin(4, seed=3) for _ in range(2))
    x = rows_of(together.start)
    joint = [together.gradients([0, 1, 2, 3], x) for _ in range(4)]
    for rank in (2, 0, 3, 1):
        for expected in joint:
            alone = apart.gradients([rank], x[rank : rank + 1])
            torch.testing.assert_close(alone.values[0], expected.values[rank], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(alone.buffer_changes[0], expected.buffer_changes[rank])


def test_dropout_is_computed_row_by_row_and_says_so(caplog):
    random_state = torch.get_rng_state()
    with caplog.at_level(logging.WARNING, "gossipdp"):
        source = objective(dropping, name="droplets").begin(2, seed=0)
    assert "the gradients of droplets are computed one worker at a time" in caplog.text
    x = source.start

    def step(seed: int) -> Gradients:
        return objective(dropping).begin(2, seed).gradients([0, 1], x)

    assert torch.equal(step(0).values, step(0).values)
    # Each step has a random state of its own.
    same_batch = objective(dropping).begin(2, seed=0)
    found = [same_batch.gradients([0], x[:1]).values for _ in range(4)]
    assert not torch.equal(found[0], found[3])
    assert torch.equal(torch.get_rng_state(), random_state)


def test_evaluation_is_in_evaluation_mode_and_leaves_training_alone():
    def evaluate(model: nn.Module) -> Evaluation:
        assert not model.training
        assert not torch.is_grad_enabled()
        assert isinstance(model, Normalised)
        torch.rand(1)
        return Evaluation(loss=float(model.norm.running_mean.sum()), metric=0.5)

    judged, plain = (objective(evaluate=evaluate).begin(2, seed=0) for _ in range(2))
    x = rows_of(judged.start)
    random_state = torch.get_rng_state()
    for _ in range(3):
        evaluation = judged.evaluate(x[0])
        assert evaluation.loss == pytest.approx(float(x[0, 15:18].sum()))
        assert evaluation.metric == 0.5
        left, right = judged.gradients([0, 1], x), plain.gradients([0, 1], x)
        assert torch.equal(left.values, right.values)
        assert torch.equal(left.buffer_changes, right.buffer_changes)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_without_an_evaluation_the_first_batches_are_judged():
    source = objective(dropping).begin(2, seed=0)
    model = dropping().eval()
    RowLayout(model).write(source.start[0], model)
    losses = []
    for rank in range(2):
        batches = [*Batches(rank, 2, 0)] * 3
        losses += [squared_error(model, batch).item() for batch in batches[:8]]
    assert source.evaluate(source.start[0]).loss == pytest.approx(sum(losses) / 16)


def test_batches_of_dicts_and_lists(caplog):
    def loss(model: nn.Module, batch: dict[str, list[Tensor]]) -> Tensor:
        return squared_error(model, (batch["pair"][0], batch["pair"][1]))

    def batches(rank: int, num_workers: int, seed: int) -> list[dict[str, list[Tensor]]]:
        return [{"pair": [*batch]} for batch in Batches(rank, num_workers, seed)]

    other = ModuleObjective(Normalised, loss, batches).begin(3, 0)
    usual = objective().begin(3, 0)
    assert not caplog.records  # both by vmap
    x = usual.start
    assert torch.equal(other.gradients([0, 1, 2], x).values, usual.gradients([0, 1, 2], x).values)


def test_modules_that_cannot_be_simulated_are_refused():
    with pytest.raises(ValueError, match="no trainable parameter"):
        objective(nn.Tanh).begin(2, 0)
    with pytest.raises(ValueError, match=r"2 dtypes \(torch\.float32, torch\.float64\)"):
        objective(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())).begin(2, 0)
    with pytest.raises(ValueError, match="on meta"):
        objective(lambda: nn.Linear(3, 3, device="meta")).begin(2, 0)
    with pytest.raises(ValueError, match="max_rows is 0"):
        objective(max_rows=0)


def test_batches_that_end_are_an_error():
    def once(rank: int, num_workers: int, seed: int) -> Iterator[Batch]:
        return iter(Batches(rank, num_workers, seed))

    ending = ModuleObjective(
        Normalised, squared_error, once, evaluate=lambda model: Evaluation(0.0)
    )
    source = ending.begin(2, 0)
    for _ in Batches.sizes:
        source.gradients([1], source.start[:1])
    with pytest.raises(ValueError, match="the batches of rank 1 have come to an end"):
        source.gradients([1], source.start[:1])
