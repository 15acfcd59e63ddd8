"""Sharded modules in one process: a world of one, or a world of four that is only pretended."""

import pytest
import torch
import torch.distributed as dist
from flattened import flatten
from process_group import process_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from gossipdp import Checkpoints, ModelChangedError, Network, PeerLostError
from gossipdp.dynamics.chunks import Role
from gossipdp.launcher.environment import Environment
from gossipdp.parallel import training_state
from gossipdp.parallel.checkpoint_files import copied_state
from gossipdp.parallel.shards import Agreed, Replica, as_sharded, local
from gossipdp.parallel.views import views_of


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


@pytest.fixture
def alone():
    with process_group("gloo", dist.HashStore(), 1):
        yield


@pytest.fixture
def four():
    """Rank 0 of four processes that are not there; nothing may be said to them."""
    with process_group("fake", FakeStore(), 4):
        yield


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.1)


def take_step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_parameters_stay_where_fsdp_put_them_and_a_shard_laid_elsewhere_is_an_error(alone):
    net = fully_shard(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))
    before = [local(parameter).data_ptr() for parameter in net.parameters()]
    flat = flatten(net, adamw(net))
    assert [local(parameter).data_ptr() for parameter in net.parameters()] == before
    with torch.no_grad():
        for segment in flat.state.segments:
            segment.x.fill_(2)
        # What FSDP gathers is what was written there.
        assert (net(torch.ones(1, 3)) == 2 * 4 * 8 + 2).all()
    assert not isinstance(net[0].weight, DTensor)
    flat.check()  # gathered parameters are no replacement
    net.double()
    with pytest.raises(ModelChangedError, match="lies elsewhere"):
        flat.check()


def test_what_fsdp_has_gathered_is_no_new_parameter_and_none_of_the_base_is_missed(alone, wrap):
    """A forward pass without gradients leaves those of the root and of the last layer gathered."""
    net = nn.Sequential(nn.Linear(3, 40), nn.Linear(40, 1))
    fully_shard(net[1], reshard_after_forward=False)
    fully_shard(net)
    net[0].requires_grad_(False)
    model = wrap(net, torch.optim.SGD(net[1].parameters(), 0.1))
    for _ in range(2):
        assert model._worker.frozen_names() == {"0.weight", "0.bias"}
        with torch.no_grad():
            net(torch.ones(1, 3))
    other = nn.Linear(1, 1)  # a module that is made after wrapping
    torch.optim.SGD(other.parameters(), 0.1).step()
    with torch.no_grad():
        net(torch.ones(1, 3))
    assert not isinstance(net[1].weight, DTensor)
    model.consolidate()
    assert isinstance(net[1].weight, DTensor), "the next forward pass gathers the average"


def test_roles_by_size_are_alike_in_all_processes_of_a_replica(four):
    """Rank 0 has 18 of the 54 values of the frozen layer, and all of the trained one."""
    net = nn.Sequential(nn.Linear(8, 6).requires_grad_(False), nn.Linear(9, 1))
    fully_shard(net)
    views = views_of(net, [torch.optim.SGD(net[1].parameters(), 0.1)])
    assert {view.role for view in views if view.name.startswith("0.")} == {Role.FROZEN}


def test_a_state_dict_has_what_exchanges_brought(alone):
    net = fully_shard(make_net())
    flat = flatten(net, adamw(net))
    values = net.state_dict()
    flat.export(values, [torch.full_like(segment.x, 3) for segment in flat.state.segments])
    assert isinstance(values["0.weight"], DTensor)
    assert (values["0.weight"].full_tensor() == 3).all()
    assert (values["1.running_mean"] == 3).all()
    assert not (local(net[0].weight) == 3).any()
    copied = copied_state(net)["0.weight"]
    assert not isinstance(copied, DTensor)
    assert torch.equal(copied, net[0].weight.full_tensor())
    assert copied_state(net, is_kept=False)["0.weight"] is None


def test_an_optimizers_state_comes_back_as_it_was(alone):
    nets = [fully_shard(make_net()) for _ in range(2)]
    first, second = map(adamw, nets)
    take_step(nets[0], first)
    captured = training_state.capture([first])
    kept = captured["optimizers"][0]["state"][0]["exp_avg_sq"]
    assert not any(isinstance(each, DTensor) for each in kept.values())
    training_state.restore(captured, [second])
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert isinstance(second.state[other][name], DTensor)
            assert torch.equal(local(second.state[other][name]), local(first.state[one][name]))
    take_step(nets[1], second)
    captured["optimizers"][0]["state"][0]["exp_avg"][training_state.SHARD] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"a shard has shape \(3,\), not \(4, 3\)"):
        training_state.restore(captured, [second])


def test_parts_are_the_memory_itself(alone):
    mesh = init_device_mesh("cpu", (1,))
    tensor = nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh))
    assert not local(tensor).requires_grad
    part = torch.ones(3, 2)
    again = as_sharded(tensor, part)
    assert local(again).data_ptr() == part.data_ptr()
    assert as_sharded(torch.zeros(3, 2), part) is part


@pytest.mark.parametrize(
    ("is_sharded", "dimension", "num_shards", "message"),
    [
        (False, "replicate", 1, "mesh= is for a model whose parameters are sharded"),
        (False, None, 2, "--nproc-per-replica is for a model"),
        (True, None, 1, "sharded over 2 processes, and nothing says"),
        (True, None, 4, "over 2 processes, and a replica has 4"),
        (True, "one", 4, "over 2 processes, and a replica has 4"),
        (True, "shard", 1, "sharded over the dimension that mesh= gives"),
        (True, "replicate", 2, "holds one replica only"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(four, is_sharded, dimension, num_shards, message):
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("one", "replicate", "shard"))
    net = make_net()
    if is_sharded:
        fully_shard(net, mesh=mesh["shard"])
    given = None if dimension is None else mesh[dimension]
    with pytest.raises(ValueError, match=message):
        Replica.of(net, given, Environment(num_shards=num_shards))


def test_a_parameter_that_several_processes_hold_is_refused(four):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = make_net()
    fully_shard(net[0], mesh=mesh["shard"])
    with pytest.raises(ValueError, match=r"parameter '1.weight' is not split over all 2"):
        Replica.of(net, mesh["replicate"], Environment())
    hsdp = fully_shard(make_net(), mesh=mesh)
    with pytest.raises(ValueError, match=r"is not split over all 4"):
        Replica.of(hsdp, None, Environment(num_shards=4))
    copied = fully_shard(make_net()[0], mesh=mesh["shard"])
    alike = nn.Parameter(distribute_tensor(torch.ones(4), mesh["shard"], [Replicate()]))
    copied.register_parameter("alike", alike)
    with pytest.raises(ValueError, match=r"'alike' is not split over all 2"):
        Replica.of(copied, mesh["replicate"], Environment())


@pytest.mark.parametrize("is_sharded_too", [False, True])
def test_tensor_parallelism_is_refused(four, is_sharded_too):
    """Also where it copies no parameter: its processes train on the same samples."""
    dims = (1, 2, 2) if is_sharded_too else (2, 1, 2)
    mesh = init_device_mesh("cpu", dims, mesh_dim_names=("replicate", "shard", "tp"))
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4, bias=False))
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if is_sharded_too:
        fully_shard(net, mesh=mesh["shard"])
    with pytest.raises(ValueError, match=r"tensor parallelism .* is not supported"):
        Replica.of(net, mesh["replicate"], Environment())


def test_a_replica_adds_up_samples_and_knows_of_the_others_once(monkeypatch):
    """Both processes have heard of the other replicas' samples: the first shard's word counts."""
    sent: list[torch.Tensor] = []

    def all_reduce(numbers: torch.Tensor, group: object) -> None:
        sent.append(numbers.clone())
        numbers.copy_(torch.stack(sent).sum(dim=0))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    other = Agreed(5, 48, is_stopped=True, is_poisoned=True, is_lead=True)
    given = [Agreed(3, 50, is_ending=True), other]
    for shard, own in enumerate(given):
        agreed = Replica(Environment(shard=shard, num_shards=2), object()).agree(own)
    assert agreed == Agreed(8, 50, is_stopped=True, is_poisoned=True, is_ending=True)
    sent.clear()
    for shard, number in enumerate((7, 3)):
        assert Replica(Environment(shard=shard, num_shards=2), object()).first_says(number) == 7
    assert not any(Agreed()), "nothing is so before anybody says it"


def test_a_process_whose_replica_has_lost_another_says_so(monkeypatch):
    def all_reduce(numbers: torch.Tensor, group: object) -> None:
        raise RuntimeError("Connection closed by peer [10.0.0.1]:4000\nException raised from ...")

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    message = r"which holds shard 1, cannot go on: .* \(Connection closed by peer \[.*\]:4000\)$"
    with pytest.raises(PeerLostError, match=message):
        Replica(Environment(shard=1, num_shards=2), object()).agree(Agreed(3))


def test_each_shard_has_files_of_its_own(tmp_path):
    replica = Replica(Environment(shard=1, num_shards=2))
    saving = replica.own_files(Checkpoints(tmp_path, resume="auto"))
    assert (saving.directory, saving.resume) == (tmp_path / "shard-1-of-2", "auto")
    assert replica.own_files(Checkpoints()) == Checkpoints()
    assert replica.own_files(Checkpoints(resume=tmp_path)).resume == tmp_path / "shard-1-of-2"
    (tmp_path / "shard-0-of-2").mkdir()
    with pytest.raises(ValueError, match=r"replicas of 2 processes, and here a replica has 4"):
        Replica(Environment(shard=3, num_shards=4)).own_files(Checkpoints(resume=tmp_path))
    with pytest.raises(ValueError, match=r"replicas of 2 processes, and here a replica has 1"):
        Replica(Environment()).own_files(Checkpoints(tmp_path))
    (tmp_path / "whole" / "worker-0").mkdir(parents=True)
    whole = Checkpoints(tmp_path / "whole")
    assert Replica(Environment()).own_files(whole) == whole
    with pytest.raises(ValueError, match=r"replicas of 1 processes, and here a replica has 2"):
        replica.own_files(whole)


def test_the_processes_of_a_replica_share_its_limit_on_sent_bytes():
    network = Network(max_megabits_per_s=80)
    assert (network.max_bytes_per_s(1), network.max_bytes_per_s(4)) == (10e6, 2.5e6)
    assert Network().max_bytes_per_s(4) is None
