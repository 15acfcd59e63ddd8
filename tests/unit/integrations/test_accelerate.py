"""Under Accelerate, on one worker; no line here imports it where tests are merely collected."""

from functools import partial
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch
from mixed_net import Net
from torch import nn

from gossipdp import Checkpoints, GossipDataParallel


def gossip_data_parallel(*arguments, **options) -> GossipDataParallel:
    from gossipdp.integrations.accelerate import gossip_data_parallel

    return gossip_data_parallel(*arguments, **options)


def accelerator_of(**arguments):
    """Make an accelerator as the first of its process."""
    import accelerate

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(cpu=True, **arguments)


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [({}, 10), ({"gradient_accumulation_steps": 2}, 6), ({"mixed_precision": "bf16"}, 10)],
)
def test_one_worker_is_the_loop_alone(arguments, steps):
    trained = []
    for is_wrapped in (False, True):
        accelerator = accelerator_of(**arguments)
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        loader = torch.utils.data.DataLoader(torch.randn(40, 4), batch_size=8, shuffle=True)
        net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
        model = gossip_data_parallel(accelerator, net, optimizer) if is_wrapped else net
        for _ in range(2):
            for batch in loader:
                with accelerator.accumulate(net):
                    accelerator.backward(model(batch).square().mean())
                    accelerator.clip_grad_norm_(net.parameters(), 0.5)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
        trained.append(net.state_dict())
    model.consolidate()
    torch.testing.assert_close(*trained, rtol=0, atol=0)
    assert (model.stats().gradient_steps, model.stats().samples) == (steps, 80)


def test_several_optimizers_step_their_own_parameters():
    from accelerate.optimizer import AcceleratedOptimizer

    from gossipdp.integrations.accelerate import torch_optimizer

    accelerator = accelerator_of()
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    inner = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in net]
    net, *optimizers = accelerator.prepare(net, *inner)
    with pytest.raises(ValueError, match=r"AcceleratedOptimizer .*gossip_data_parallel"):
        GossipDataParallel(net, optimizers)
    model = gossip_data_parallel(accelerator, net, optimizers)
    accelerator.backward(model(torch.ones(8, 4)).sum())
    for optimizer in optimizers:
        optimizer.step()
    assert model.consolidate().samples == 8
    # Within all shells is the one that steps.
    shell = AcceleratedOptimizer(optimizers[0])
    assert torch_optimizer(inner[0]) is torch_optimizer(shell) is inner[0]


def test_an_accelerator_of_several_processes_is_refused():
    from accelerate.utils import DistributedType

    several = Mock(distributed_type=DistributedType.MULTI_CPU, num_processes=2)
    net = nn.Linear(4, 2)
    message = r"\(MULTI_CPU, 2 processes\): make it within `with single_process\(\):`"
    with pytest.raises(ValueError, match=message):
        gossip_data_parallel(several, net, torch.optim.SGD(net.parameters(), lr=0.1))


def test_the_data_of_a_seedable_sampler_go_on_where_they_were(tmp_path):
    from accelerate import DataLoaderConfiguration

    seedable = DataLoaderConfiguration(use_seedable_sampler=True)

    def train(stop_after: int, **options) -> list[list[float]]:
        accelerator = accelerator_of(dataloader_config=seedable)
        torch.manual_seed(3)
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        data = torch.arange(12.0).reshape(12, 1)
        loader = torch.utils.data.DataLoader(data, batch_size=3, shuffle=True)
        net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
        model = gossip_data_parallel(accelerator, net, optimizer, budget_samples=36, **options)
        seen = []
        for batch in model.batches(loader):
            seen.append(batch.flatten().tolist())
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            if len(seen) == stop_after:
                model.save_checkpoint()
                break
        model.close()
        return seen

    whole = train(99)
    assert len(whole) == 12
    assert train(6, checkpoints=Checkpoints(tmp_path)) == whole[:6]
    assert train(99, checkpoints=Checkpoints(tmp_path, resume="auto")) == whole[6:]


def test_what_accelerate_saves_is_whole(tmp_path):
    accelerator = accelerator_of()
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net, optimizer = accelerator.prepare(net, optimizer)
    model = gossip_data_parallel(accelerator, net, optimizer)

    def step():
        accelerator.backward(model(torch.ones(5, 2, 4, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        return {name: value.clone() for name, value in net.state_dict().items()}

    def saved(file):
        tensors = safetensors.torch.load_file(file)
        tensors.setdefault("tied.weight", tensors.get("inner.weight"))
        tensors.setdefault("inner.weight", tensors["tied.weight"])
        return tensors

    check = partial(torch.testing.assert_close, rtol=0, atol=0)
    before = step()
    accelerator.save_state(tmp_path / "state")
    with model.averaged():
        accelerator.save_model(net, tmp_path / "averaged")
    accelerator.save(model.state_dict(), tmp_path / "wrapper", safe_serialization=True)
    check(saved(tmp_path / "averaged" / "model.safetensors"), before)
    check(saved(tmp_path / "wrapper"), before)
    step()
    accelerator.load_state(tmp_path / "state")
    check(dict(net.state_dict()), before)
    end = step()
    model.consolidate()
    accelerator.save_model(net, tmp_path / "end")
    check(saved(tmp_path / "end" / "model.safetensors"), end)
