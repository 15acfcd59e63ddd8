"""Training with parameters on a device that queues: a stand-in, or a CUDA device."""

import contextlib
import itertools
import os
from typing import Any

import pytest
import torch
from clocked_device import ClockedDevice
from torch import nn

from gossipdp import Checkpoints, Exchange, GossipDataParallel, Network
from gossipdp.dynamics.state import State
from gossipdp.parallel import flat_parameters

pytestmark = pytest.mark.processes
CUDA = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


class Net(nn.Module):
    """Two chunks, a float buffer and one of integers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(int(os.environ["RANK"]))
        self.hidden = nn.Linear(8, 30000)
        self.last = nn.Linear(30000, 2)
        self.register_buffer("running_mean", torch.zeros(8))
        self.register_buffer("running_var", torch.ones(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.running_mean.mul_(0.9).add_(inputs.mean(dim=0), alpha=0.1)
            self.count.add_(1)
        return self.last(self.hidden(inputs).tanh())


def enter(kind: str, stack: contextlib.ExitStack) -> Any:
    """Let this process's parameters be on such a device; return the stand-in."""
    if kind != "stand-in":
        return None
    device = ClockedDevice(is_strict=False)

    class DeviceState(State):
        def __init__(self, segments, moments):
            super().__init__(segments, device, moments=moments)
            device.adopt_state(self)

    flat_parameters.State = DeviceState  # type: ignore[misc]
    stack.enter_context(device.used())
    return device


def train(kinds: tuple[str, str], wire_format: str, folder: str) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    place = "cuda" if kinds[rank] == "cuda" else "cpu"
    with contextlib.ExitStack() as stack:
        net = Net().to(place)
        device = enter(kinds[rank], stack)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
        options = {"checkpoints": Checkpoints(folder), "network": Network(start_timeout_s=60)}
        options["exchange"] = Exchange(moments={"momentum_buffer": 2})
        model = GossipDataParallel(net, optimizer, wire_format=wire_format, **options)
        generator = torch.Generator().manual_seed(rank)
        inputs = torch.randn(8, 8, generator=generator).to(place)
        labels = (inputs[:, 0] > 0).long()
        losses = []
        for step in itertools.count():
            if step >= 24 and model.stats().exchanges > 5:
                break
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if step == 12:
                model.save_checkpoint()
                state = model.state_dict()
                with model.averaged():
                    loss = nn.functional.cross_entropy(net(inputs), labels)
                    averaged_loss = float(loss.detach())
        result = model.consolidate()
        parts = [value.detach().double().flatten() for value in net.state_dict().values()]
        final = torch.cat([part.to("cpu", copy=True) for part in parts])
    return {
        "final": final,
        "losses": losses,
        "averaged": averaged_loss,
        "distance": result.consensus_distance,
        "stats": model.stats(),
        "names": list(state),
        "queued": device.num_operations if device is not None else 0,
    }


@pytest.mark.parametrize(
    ("kinds", "wire_format"),
    [
        (("stand-in", "stand-in"), "full"),
        (("host", "stand-in"), "lattice8"),
        pytest.param(("cuda", "cuda"), "full", marks=CUDA),
        pytest.param(("host", "cuda"), "lattice8", marks=CUDA),
    ],
    ids=["device", "mixed", "cuda", "mixed-cuda"],
)
def test_training_on_a_device(kinds, wire_format, workers, tmp_path):
    one, other = results = workers(train, 2, args=(kinds, wire_format, str(tmp_path)))
    assert torch.equal(one["final"], other["final"])
    for kind, result in zip(kinds, results, strict=True):
        assert result["losses"][-1] < 0.7 * result["losses"][0]
        assert result["averaged"] < result["losses"][0]
        assert result["distance"] < 1.0
        assert result["stats"].exchanges > 5
        assert result["stats"].checkpoints == 3, "the script's own, and two at the end"
        layers = ["hidden.weight", "hidden.bias", "last.weight", "last.bias"]
        assert result["names"] == ["running_mean", "running_var", "count", *layers]
        if kind != "host":
            assert result["stats"].kernels == "torch on the device"
        assert (result["queued"] > 1000) == (kind == "stand-in")
