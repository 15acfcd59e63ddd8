"""Where a state lives, and what is refused."""

import pytest
import torch
from torch import nn

from gossipdp.dynamics.state import Role, Segment, State
from gossipdp.parallel.flat_parameters import FlatParameters
from gossipdp.runtime.cuda import CudaDevice, is_cuda_allowed
from gossipdp.runtime.device import HostMemory, device_of

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_host_memory_queues_nothing() -> None:
    device = device_of(State([Segment(torch.ones(3), Role.TRAINED)]))
    assert isinstance(device, HostMemory)
    values = torch.ones(3)
    assert device.in_host_memory(values) is values
    with device.gossip_thread(), device.lock():
        device.write(lambda out: out.fill_(2.0), values)
        device.finish()
    assert values.tolist() == [2.0] * 3


def test_a_state_without_chunks_lives_in_host_memory() -> None:
    assert isinstance(device_of(State([])), HostMemory)


def test_other_devices_and_several_are_refused() -> None:
    meta = Segment(torch.ones(3, device="meta"), Role.COPIED)
    with pytest.raises(ValueError, match="on meta; exchanges know the CPU and CUDA"):
        device_of(State([meta]))
    with pytest.raises(ValueError, match=r"several devices \(cpu, meta\); move the module to one"):
        device_of(State([meta, Segment(torch.ones(3), Role.TRAINED)]))


def test_cuda_is_for_those_who_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOSSIPDP_CUDA", raising=False)
    assert not is_cuda_allowed()
    monkeypatch.setenv("GOSSIPDP_CUDA", "1")
    assert not is_cuda_allowed()
    monkeypatch.setenv("GOSSIPDP_CUDA", "experimental")
    assert is_cuda_allowed()


@pytest.mark.cuda
@NO_CUDA
def test_a_module_on_a_card_is_refused_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(3, 2).to("cuda")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    monkeypatch.delenv("GOSSIPDP_CUDA", raising=False)
    with pytest.raises(ValueError, match="GOSSIPDP_CUDA=experimental"):
        FlatParameters(net, [optimizer], momentum=True)
    monkeypatch.setenv("GOSSIPDP_CUDA", "experimental")
    state = FlatParameters(net, [optimizer], momentum=True).state
    assert isinstance(device_of(state), CudaDevice)
