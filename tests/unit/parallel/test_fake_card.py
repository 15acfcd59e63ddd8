"""A worker whose parameters are on a device: what it saves, resumes and averages."""

import pytest
import torch
import torch.distributed as dist
from fake_card import CARD
from process_group import process_group
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from gossipdp import Checkpoints, Exchange, GossipDataParallel, Monitor
from gossipdp.dynamics.chunks import Role
from gossipdp.dynamics.state import State
from gossipdp.protocol.exchange_rate import NUM_TO_KNOW


class Net(nn.Module):
    """A parameter that is trained, sharded over ``mesh``, one that follows it, and buffers."""

    def __init__(self, dtype: torch.dtype, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        place = {"device": CARD, "dtype": dtype}
        trained = torch.zeros(50, 3, **place)
        if mesh is not None:
            trained = DTensor.from_local(trained, mesh, [Shard(0)], run_check=False)
        self.trained = nn.Parameter(trained)
        self.following = nn.Parameter(torch.zeros(5, **place), requires_grad=False)
        self.register_buffer("running_mean", torch.zeros(3, **place))
        self.register_buffer("running_var", torch.ones(3, **place))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=CARD))


def step(net: Net, optimizer: torch.optim.Optimizer) -> None:
    """Take a step; the backward pass of a fake tensor needs a driver."""
    net.trained.grad = torch.zeros_like(net.trained)
    optimizer.step()


@pytest.fixture
def started(card, wrap, tmp_path, monkeypatch, at_once):
    # One worker alone has no use for momentum.
    monkeypatch.setattr(State, "drop_momentum", lambda state: None)

    def start(dtype, mesh=None, **options):
        net = Net(dtype, mesh)
        optimizer = torch.optim.AdamW([net.trained])
        saving = Checkpoints(tmp_path, resume="auto" if any(tmp_path.iterdir()) else None)
        options = {"graph": "ring", "exchange": Exchange(moments={"exp_avg_sq": 1})} | options
        return net, optimizer, wrap(net, optimizer, checkpoints=saving, **options)

    return start


@pytest.fixture
def mesh():
    """Yield a mesh of this process alone: its shard is all there is."""
    with process_group("gloo", dist.HashStore(), 1):
        yield DeviceMesh("cuda", [0], _init_backend=False)


def exchange(model: GossipDataParallel) -> None:
    """Do in the main thread what an exchange of the gossip thread does to the device."""
    state = model._worker._state
    for chunk in state.carried([1]):
        mine, peers = torch.ones(2, chunk.num_elements, dtype=chunk.x.dtype)
        chunk.snapshot(1.0, mine)
        chunk.exchange(1.0, mine, peers, 1.5)


def test_a_step_within_a_graph_is_refused(started, monkeypatch):
    net, optimizer, model = started(torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match=r"is being captured in a CUDA graph, .*capture the"):
            step(net, optimizer)
    step(net, optimizer)
    assert model.stats().gradient_steps == 1


def test_a_loss_on_a_device_is_read_after_the_next_boundary(card, started, tmp_path):
    """No other thread reads it: that one would wait for the default stream, and no other."""
    monitor = Monitor(log_dir=tmp_path / "log", status_port=0)
    net, optimizer, model = started(torch.float32, monitor=monitor)
    card.reads.clear()
    model.log(loss=torch.zeros((), device=CARD))
    assert not card.reads
    step(net, optimizer)
    assert [each for each in card.reads if each.startswith("_read_losses")]
    assert list(model._worker.monitoring._losses) == [1.0]
    model.log(loss=torch.zeros((), device=CARD))
    model.close()
    assert list(model._worker.monitoring._losses) == [1.0, 1.0]


def test_the_main_thread_finishes_before_the_other_takes_over(card, started):
    """Rule 4; and before it reads chunk by chunk, so that the other waits for no step."""
    net, optimizer, model = started(torch.float32)
    assert "_start_thread" in card.finishes

    def finishes(use):
        card.finishes.clear()
        use()
        return card.finishes

    assert "_take_in" in finishes(lambda: step(net, optimizer))
    waits = card.num_waits
    assert not finishes(lambda: step(net, optimizer))
    assert card.num_waits == waits, "it finds nothing to add, and no joiner asks"
    for chunk in model._worker._state.chunks:
        chunk.has_pending = chunk.role is Role.BUFFER
    assert "_queued_boundary" in finishes(lambda: step(net, optimizer))
    assert "_copies" in finishes(model.state_dict)
    assert "_forget" in finishes(lambda: net.load_state_dict(net.state_dict()))
    assert "swap" in finishes(model._worker.end_averaged)
    assert "tensors" in finishes(model.save_checkpoint)
    assert "_wait_for_average" in finishes(model.consolidate)


def test_an_exchange_on_a_card_takes_less_of_a_step(started):
    _, _, model = started(torch.float32)
    rate = model._worker._protocol.exchange_rate
    for _ in range(NUM_TO_KNOW):
        rate.exchanged(0.001)
        rate.took_processor(0.01, 0.0)
    rate.saw_idle(0.0, 0.0)
    rate.stepped(0.1)
    assert (rate.rate, rate.bound) == (pytest.approx(0.3), "processor")


@pytest.mark.parametrize(
    ("dtype", "before", "after"),
    [
        (torch.float32, "a2cid2", "a2cid2"),
        (torch.bfloat16, "a2cid2", "gossip"),
        (torch.bfloat16, "gossip", "a2cid2"),
    ],
)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_run_goes_on(started, request, dtype, *, before, after, is_sharded):
    """Train, save, resume under another method; use all that touches the parameters."""
    mesh = request.getfixturevalue("mesh") if is_sharded else None
    net, optimizer, model = started(dtype, mesh, method=before)
    for _ in range(2):
        step(net, optimizer)
        exchange(model)
    model.save_checkpoint()
    model.close()
    net, optimizer, model = started(dtype, mesh, method=after)
    assert model.stats().kernels == "torch on the device"
    step(net, optimizer)
    exchange(model)
    held = model.state_dict()
    assert held["trained"].device == CARD
    net.load_state_dict(held)
    with model.averaged():
        assert net.trained.device == CARD
        net.trained.sum()
    offer = model._worker.between_steps._describe()
    for tensor in offer.tensors:
        assert offer.copy(tensor, torch.empty(tensor.numel(), dtype=torch.uint8))
    step(net, optimizer)
    assert model.consolidate().world_size == 1
    step(net, optimizer)
    assert net.trained.device == net.following.device == net.count.device == CARD
    for held in (net.trained, *optimizer.state[net.trained].values()):
        assert mesh is None or held.ndim == 0 or isinstance(held, DTensor)
    if mesh is None:
        net.trained.data = net.trained.detach().clone()
        step(net, optimizer)
