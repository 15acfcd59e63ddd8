"""The interface of every workload; the small Python tree stands in for the real one."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from gossipdp.parallel.module import seed_of
from gossipdp.parallel.options import METHODS
from gossipdp_lab.tasks import RECIPES, WORKLOADS, MethodName, make_workload
from gossipdp_lab.tasks.command import Recipe
from gossipdp_lab.tasks.digits import Digits
from gossipdp_lab.tasks.text import PyStdlib
from gossipdp_lab.tasks.workload import BatchLoader, Workload, worker_seed

MakeWorkload = Callable[..., Workload[Any]]


@pytest.fixture(scope="module")
def python_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    for index in range(60):
        folder = root / f"package_{index % 7}"
        folder.mkdir(exist_ok=True)
        (folder / f"module_{index}.py").write_text(f"answer_{index} = {index}\n" * 60)
    return root


@pytest.fixture(params=sorted(WORKLOADS))
def make(
    request: pytest.FixtureRequest, python_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> MakeWorkload:
    if request.param == "pystdlib-small":
        monkeypatch.setattr(PyStdlib, "num_validation_windows", 32)
        return lambda **options: PyStdlib(data=python_tree, **options)
    return lambda **options: make_workload(request.param, **options)


def flatten(batch: Tensor | tuple[Tensor, ...]) -> Tensor:
    tensors = (batch,) if isinstance(batch, Tensor) else batch
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def initial_parameters(workload: Workload, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return nn.utils.parameters_to_vector(workload.make_model().parameters())


def test_the_model_follows_from_the_seed(make):
    assert torch.equal(initial_parameters(make(), 3), initial_parameters(make(), 3))
    assert not torch.equal(initial_parameters(make(), 3), initial_parameters(make(), 4))


def test_batches_follow_from_rank_and_seed(make):
    def first(rank: int, seed: int) -> Tensor:
        return flatten(next(iter(make().train_loader(rank, 4, seed))))

    assert torch.equal(first(1, 0), first(1, 0))
    assert not torch.equal(first(1, 0), first(2, 0))
    assert not torch.equal(first(1, 0), first(1, 1))


def test_an_epoch_has_len_full_batches_and_the_next_is_shuffled_again(make):
    workload = make(batch_size=5)
    loader = workload.train_loader(0, 2, 0)
    epochs = [[flatten(batch) for batch in loader] for _ in range(2)]
    assert [len(epoch) for epoch in epochs] == [len(loader)] * 2
    assert len({len(batch) for batch in epochs[0]}) == 1
    assert not torch.equal(torch.stack(epochs[0]), torch.stack(epochs[1]))


def test_a_few_steps_lower_the_loss_and_better_the_metric(make):
    workload = make()
    torch.manual_seed(0)
    model = workload.make_model()
    optimizer = workload.make_optimizer(model)
    before = workload.evaluate(model)
    losses = []
    batches = iter(workload.train_loader(0, 1, 0))
    for _ in range(12):
        loss = workload.loss(model, next(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    after = workload.evaluate(model)
    assert losses[-1] < losses[0]
    assert after < before if "bits" in workload.metric_name else after > before


def test_evaluation_restores_the_mode_and_changes_nothing(make):
    workload = make()
    model = workload.make_model()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    first = workload.evaluate(model)
    assert model.training
    assert workload.evaluate(model.eval()) == first
    assert not model.training
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_the_transformer_is_causal_and_has_tied_embeddings(python_tree):
    model = PyStdlib(data=python_tree).make_model().eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == 70_592
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.weight")
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, -1] = (tokens[0, -1] + 1) % 256
    torch.testing.assert_close(model(tokens)[0, :-1], model(changed)[0, :-1])


def test_workers_of_the_command_have_orders_of_their_own():
    """Each is rank 0 of 1 with a seed of its own, of which torch's generators keep 32 bits."""
    seeds = [seed_of(run, worker, life) for run in (0, 1) for worker in range(8) for life in (0, 1)]
    shuffles = [worker_seed(0, 1, seed) for seed in seeds]
    generators = [torch.Generator().manual_seed(each) for each in shuffles]
    orders = {tuple(torch.randperm(9, generator=each).tolist()) for each in generators}
    assert max(shuffles) < 2**32
    assert len(orders) == len(seeds)


def test_an_epochs_order_follows_from_its_number():
    def loader() -> BatchLoader[Tensor]:
        return BatchLoader(torch.arange(40), batch_size=5, seed=3, gather=lambda chosen: chosen)

    one, other = loader(), loader()
    epochs = []
    for epoch in range(3):
        one.set_epoch(epoch)
        epochs.append(torch.cat(list(one)))
    other.set_epoch(2)
    assert torch.equal(torch.cat(list(other)), epochs[2])
    assert not torch.equal(epochs[1], epochs[2])
    assert torch.equal(torch.cat(list(loader())), epochs[0])


def test_the_perceptron_has_the_same_data():
    perceptron, usual = Digits(network="perceptron"), Digits()
    torch.manual_seed(0)
    model = perceptron.make_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == 4810
    batch = next(iter(perceptron.train_loader(1, 3, 0)))
    assert torch.equal(flatten(batch), flatten(next(iter(usual.train_loader(1, 3, 0)))))
    assert perceptron.training_loss(model) == pytest.approx(math.log(10), abs=0.1)


@pytest.mark.parametrize("alpha", [0.05, 1000.0])
def test_dirichlet_shares_of_the_classes(alpha):
    digits = Digits(network="perceptron", batch_size=1437, dirichlet_alpha=alpha)
    shares = []
    for rank in range(40):
        (_, labels), (_, again) = (next(iter(digits.train_loader(rank, 40, 0))) for _ in range(2))
        assert torch.equal(labels, again)
        shares.append(torch.bincount(labels, minlength=10) / 1437)
    # A share of Dirichlet(alpha, .., alpha) has variance 0.09 / (10 alpha + 1); drawing 1,437
    # images of such shares adds a little.
    variance = float((torch.stack(shares) - 0.1).square().mean())
    assert variance == pytest.approx(0.09 / (10 * alpha + 1) + 0.09 / 1437, rel=0.3)


def test_every_recipe_has_options_and_a_class():
    kinds = [get_args(annotated)[0] for annotated in get_args(Recipe)]
    assert [kind.recipe for kind in kinds] == list(RECIPES)
    assert get_args(MethodName) == (*METHODS, "allreduce")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_workload("mnist"), "no workload 'mnist'; choose one of digits, pystdlib"),
        (lambda: make_workload("digits", batch_size=0), "batch_size is 0"),
        (lambda: Digits(network="transformer"), "unknown network 'transformer'; choose one of"),
        (lambda: Digits(dirichlet_alpha=0.0), r"dirichlet_alpha is 0\.0; it must be a positive"),
        (lambda: Digits().train_loader(4, 4, 0), "rank is 4; with 4 workers"),
        (lambda: worker_seed(-1, 4, 0), "rank is -1"),
        (lambda: worker_seed(0, 1, -1), "seed is -1; it must be at least 0"),
        (
            lambda: BatchLoader(torch.arange(3), batch_size=4, seed=0, gather=lambda rows: rows),
            "holds 3 samples, less than one batch of 4",
        ),
    ],
)
def test_invalid_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
