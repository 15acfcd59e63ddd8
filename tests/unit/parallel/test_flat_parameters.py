import copy
import gc
import weakref

import pytest
import torch
from checkpointing import sgd
from flattened import flatten
from mixed_net import Net
from torch import nn
from torch.ao.quantization import PerChannelMinMaxObserver
from torch.nn.utils.parametrizations import spectral_norm
from torch.testing._internal.two_tensor import TwoTensor

from gossipdp.dynamics.chunks import Role
from gossipdp.dynamics.device import LEAST_HUGE_BYTES
from gossipdp.errors import ModelChangedError
from gossipdp.parallel.flat_parameters import ALIGNMENT_BYTES, chunk_bytes_for
from gossipdp.parallel.options import Exchange
from gossipdp.parallel.views import views_of


def test_the_values_of_a_large_model_stay():
    # On huge pages, a flat tensor begins somewhere within its storage.
    net = nn.Sequential(nn.Linear(2048, 4096), nn.Linear(8, 8))
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    flat = flatten(net)
    assert flat.state.segments[0].x.nbytes > LEAST_HUGE_BYTES
    named = flat.named([segment.x for segment in flat.state.segments])
    torch.testing.assert_close(dict(net.named_parameters()), before, rtol=0, atol=0)
    torch.testing.assert_close(named, before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_tensor_has_a_storage_of_its_own(dtype):
    net = Net().to(dtype).to(memory_format=torch.channels_last)
    net.register_buffer("empty", torch.zeros(0, 3))
    net.alike = nn.Parameter(torch.ones(1, dtype=dtype).expand(4))
    flat = flatten(net)
    flat.swap([segment.x.clone() for segment in flat.state.segments])
    flat.swap_back()
    values = net.state_dict()
    flat.export(values, [segment.x.clone() for segment in flat.state.segments])
    exported = [value for name, value in values.items() if value.numel() and "tied" not in name]
    state = net.state_dict()
    assert state["tied.weight"].data_ptr() == state["inner.weight"].data_ptr()
    assert net.alike.is_contiguous()
    assert torch.equal(net.alike, torch.ones(4, dtype=dtype))
    for tensors in (list(net.parameters()) + list(net.norm.buffers()), exported):
        storages = [tensor.untyped_storage() for tensor in tensors]
        assert len({storage.data_ptr() for storage in storages}) == len(tensors)
        for tensor, storage in zip(tensors, storages, strict=True):
            assert storage.data_ptr() == tensor.data_ptr()
            assert storage.nbytes() == tensor.numel() * tensor.itemsize


def test_the_storages_outlive_the_flat_parameters():
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    segments = [weakref.ref(segment.x) for segment in flatten(net).state.segments]
    gc.collect()
    assert all(segment() is None for segment in segments)
    # Memory that was let go would be used for these.
    others = [torch.full_like(value, 7) for value in before.values() for _ in range(20)]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert others


def test_the_segments_by_role_are_the_aligned_memory_of_the_module():
    net = Net()
    net.register_buffer("cache", torch.zeros(4), persistent=False)
    flat = flatten(net)
    by_role = {segment.role: segment for segment in flat.state.segments}
    assert set(by_role) == {Role.TRAINED, Role.BUFFER, Role.COPIED, Role.UNOPTIMIZED}
    assert by_role[Role.TRAINED].c is not None
    assert by_role[Role.BUFFER].c is None
    assert by_role[Role.UNOPTIMIZED].pending.numel() == 0
    for segment in flat.state.segments:
        segment.x.fill_(7)
    for tensor in [*net.parameters(), *net.norm.buffers()]:
        assert (tensor == 7).all()
        assert tensor.data_ptr() % ALIGNMENT_BYTES == 0
    assert not net.cache.any()


def test_only_statistics_of_norms_are_averaged_and_others_by_name():
    """A queue, a mask, u of spectral norm, a counter, an fp8 scale, integers; empty ones stay."""
    net = nn.Sequential(nn.BatchNorm1d(3), spectral_norm(nn.Linear(3, 3)), nn.Linear(9, 9))
    for name, value in {
        "queue": torch.randn(3, 4),
        "mask": torch.full((3, 3), -torch.inf).triu(1),
        "at": torch.tensor(7),
        "scale": torch.tensor([0.5]).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0),
        "running_mean": torch.ones(2),  # without a variance it is no norm's
    }.items():
        net.register_buffer(name, value)
    net[0].register_buffer("peak", torch.ones(3))
    net[2]._buffers.update(running_mean=torch.tensor(3), running_var=torch.tensor(4))
    before = {name: value.clone() for name, value in net.state_dict().items()}

    def averaged(**options):
        views = views_of(net, [sgd(net)], Exchange(**options))
        return {view.name for view in views if view.role is Role.BUFFER}

    assert averaged() == {"0.running_mean", "0.running_var"}
    assert averaged(buffers=["queue", "0.*_var"]) == {"queue", "0.running_var"}
    assert averaged(buffers=()) == set()
    for names, message in (["at"], "'at': torch.int64 has no average"), (["queue", "x"], "no such"):
        with pytest.raises(ValueError, match=message):
            averaged(buffers=names)
    flat = flatten(net)
    for name, value in net.state_dict().items():
        assert torch.equal(value.float(), before[name].float()), name
    net.empty.resize_(5).fill_(2.0)
    flat.check()
    net.empty_observer = PerChannelMinMaxObserver()
    with pytest.raises(ValueError, match=r"'empty_observer.min_val' takes its shape from"):
        flatten(net)


def test_channels_last_stays_and_is_part_of_the_description():
    plain, last = Net(), Net().to(memory_format=torch.channels_last)
    plain_lines, last_lines = flatten(plain).description(), flatten(last).description()
    assert last.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert not last.conv.weight.is_contiguous()
    assert plain_lines != last_lines
    assert flatten(nn.Linear(3, 2)).description()[1] == ("bias (float32, trained, segment 0)", (2,))


def test_chunks_are_larger_on_an_accelerator_or_as_the_variable_says(monkeypatch):
    sizes = [1 << bits for bits in (20, 26, 29, 40)]
    cuts = [[chunk_bytes_for(n, is_on_accelerator=on) >> 20 for n in sizes] for on in (False, True)]
    assert cuts == [[1, 1, 2, 4], [1, 16, 32, 32]]
    for given in (1, 64, 2):
        monkeypatch.setenv("GOSSIPDP_CHUNK_MIB", str(given))
        cuts = {chunk_bytes_for(n, is_on_accelerator=on) for n in sizes for on in (False, True)}
        assert cuts == {given << 20}
    assert "in chunks of 524288)" in flatten(nn.Linear(1024, 600)).state.description()[0][0]
    for given in ("", "0", "65", "1.5", "-1", "two"):
        monkeypatch.setenv("GOSSIPDP_CHUNK_MIB", given)
        with pytest.raises(ValueError, match="it takes a whole number, 1 to 64"):
            chunk_bytes_for(1)


def test_one_segment_per_type_and_optimizer():
    net = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3)])
    optimizers = [
        torch.optim.SGD([{"params": each.parameters()} for each in net[:2]], lr=0.1),
        torch.optim.AdamW(net[2].parameters()),
    ]
    flat = flatten(net, *optimizers)
    assert [(s.x.dtype, s.optimizer_index, s.pending.dtype) for s in flat.state.segments] == [
        (torch.float32, 0, torch.float32),
        (torch.bfloat16, 0, torch.float32),
        (torch.float32, 1, torch.float32),
    ]


def test_new_data_of_a_parameter_and_a_buffer_assigned_in_forward_are_adopted():
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 2))
    flat = flatten(net, *map(sgd, net))
    for layer in net:
        layer.weight.data = torch.full((2, 3), 7.0)
    for index in (1, 0):  # each by the boundary of its own optimizer
        assert net[index].weight.data_ptr() != flat.state.segments[index].x.data_ptr()
        flat.check(index)
        assert net[index].weight.data_ptr() == flat.state.segments[index].x.data_ptr()
        assert torch.equal(flat.state.segments[index].x[:6], torch.full((6,), 7.0))
        assert not flat.state.segments[index].x.requires_grad
    net = nn.BatchNorm1d(4)
    net.register_buffer("tied", net.running_mean)  # of two places the later counts
    flat = flatten(net)
    net.running_mean, net.tied = torch.full((4,), 2.0), torch.full((4,), 3.0)
    flat.check()
    buffers = next(s for s in flat.state.segments if s.role is Role.BUFFER)
    assert torch.equal(buffers.x[:4], torch.full((4,), 3.0))
    assert net.running_mean is net.tied
    net.running_mean.add_(1.0)
    assert buffers.x[0] == 4.0


def test_what_is_forgotten_of_a_part_is_all_but_its_values(monkeypatch):
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    monkeypatch.setattr("gossipdp.parallel.flat_parameters.chunk_bytes_for", lambda *_, **__: 48)
    flat = flatten(net)
    (segment,) = flat.state.segments
    segment.chunks[0].lock = None  # no values of the second layer are there: it is left alone
    before = segment.x.clone()
    for tensor in (segment.pending, segment.c):
        tensor.fill_(9.0)
    flat.forget(flat.exchanged(net[1].parameters()))
    for tensor in (segment.pending, segment.c):
        for name, held in flat.named([tensor]).items():
            assert (held == (0.0 if name.startswith("1") else 9.0)).all(), name
    assert torch.equal(segment.x, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda net: net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True),
            "'weight' was replaced by another object after wrapping.*Load without assign",
        ),
        (lambda net: setattr(net, "running_mean", torch.zeros(5)), r"\(4,\) to \(5,\) .*=False"),
        (
            lambda net: setattr(net, "running_mean", torch.zeros(4).double()),
            r"'running_mean' .* to torch\.float64 .*; if forward\(\) .* persistent=False",
        ),
        (
            lambda net: setattr(net.weight, "data", torch.zeros(5)),  # as transformers resizes
            r"'weight' has changed from \(4,\) to \(5,\) since wrapping. Resize parameters before",
        ),
        (
            lambda net: net.sgd.add_param_group({"params": [torch.ones(1)]}),
            "held 1 parameters .* and holds 2 now; add parameter groups before wrapping",
        ),
        (lambda net: setattr(net, "alias", nn.Parameter(torch.ones(4))), "'weight' was replaced"),
        (lambda net: net.double(), r"from torch\.float32 to torch\.float64 .*Call \.to\(\)"),
        (lambda net: net.to("meta"), "'weight' has changed from cpu to meta"),
        (lambda net: net.share_memory(), "'weight' was moved to memory that processes shar"),
        (lambda net: delattr(net, "running_mean"), "'running_mean' was removed"),
    ],
)
def test_a_refusal_says_what_has_changed(change, message):
    net = nn.BatchNorm1d(4)
    net.alias = net.weight
    net.sgd, other = (torch.optim.SGD([each], 0.1) for each in net.parameters())
    flat = flatten(net, net.sgd, other)
    net.bias.requires_grad_(False)  # is no change
    flat.check()
    change(net)
    for index in (0, None):  # the first optimizer's boundary sees buffers too
        with pytest.raises(ModelChangedError, match=message):
            flat.check(index)


def test_unfreezing_is_found_unless_frozen_parameters_are_exchanged():
    net = Net()
    flat = flatten(net, sgd(net.conv), sgd(net.head))
    net.frozen.bias.requires_grad_(True)
    for index in (None, 1):  # 1: as around the steps of a second optimizer alone
        with pytest.raises(ModelChangedError, match=r"frozen\.bias.*Exchange\(frozen=True"):
            flat.check(index)
    net = Net()
    flat = flatten(net, frozen=True)
    net.frozen.requires_grad_(True)
    flat.check()


def test_autocast_sees_what_was_swapped_in():
    """Within one region of autocast, as where the own loss is compared with the average's."""
    net = nn.Linear(3, 2, bias=False)
    flat, inputs = flatten(net), torch.ones(1, 3)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        own = net(inputs)
        flat.swap([torch.full_like(segment.x, 2.0) for segment in flat.state.segments])
        assert torch.equal(net(inputs), torch.full((1, 2), 6.0, dtype=torch.bfloat16))
        flat.swap_back()
        assert torch.equal(net(inputs), own)


def test_views_of_parameters_in_a_state_dict_become_views_of_the_others():
    """As where a hook splits a fused projection, or turns it round; one of its bits stays."""
    net = nn.Linear(4, 6)
    flat, weight = flatten(net), net.weight.detach()
    query, value, bits = *weight.chunk(2), weight.view(torch.int32)
    values = {"query": query, "value": value, "turned": weight.T, "bits": bits, "copy": query + 0}
    flat.export(values, [torch.arange(64.0) for _ in flat.state.segments])
    new = torch.arange(24.0).view(6, 4)
    expected = {"query": new[:3], "value": new[3:], "turned": new.T, "bits": bits, "copy": query}
    torch.testing.assert_close(values, expected, rtol=0, atol=0)


def adapted(base: nn.Module) -> nn.ModuleDict:
    adapter = nn.Linear(8, 1, bias=False)
    return nn.ModuleDict({"base": base.requires_grad_(False), "adapter": adapter})


def test_a_frozen_base_is_left_alone_and_what_moves_in_it_is_told(caplog):
    net = adapted(nn.Linear(8, 2))  # 18 values, for an adapter of 8
    for name, values in ("empty", torch.empty(0)), ("absent", torch.empty(1, device="meta")):
        net["base"].register_parameter(name, nn.Parameter(values, requires_grad=False))
    place = net["base"].weight.data_ptr()
    flat = flatten(net)
    assert {segment.role for segment in flat.state.segments} == {Role.TRAINED}
    assert net["base"].weight.data_ptr() == place
    assert flat.frozen_names() == {f"base.{name}" for name in net["base"].state_dict()}
    flat.check()
    flat.check()
    assert not caplog.records
    net["base"].bias.data.mul_(0.99)
    flat.check()
    flat.check()
    (record,) = caplog.records
    assert "'base.bias' changes although no optimizer trains it" in caplog.text
    assert "Wrap with exchange=Exchange(frozen=True)" in record.getMessage()


@pytest.mark.parametrize("name", ["absent", "none", "empty"])
@pytest.mark.parametrize(("num_before", "index"), [(1, 0), (20, None)])  # at steps; at the end
def test_a_buffer_that_is_made_after_wrapping_is_named_once(name, num_before, index, caplog):
    net = nn.Sequential(nn.BatchNorm1d(4))
    net[0].register_buffer("none", None)
    net[0].register_buffer("empty", torch.zeros(0))
    net[0].register_buffer("cache", None, persistent=False)
    flat = flatten(net)
    net[0].cache, net[0].running_mean = torch.ones(3), torch.ones(4)
    for _ in range(num_before):
        flat.check(0)
    assert not caplog.records
    net[0].register_buffer(name, torch.ones(2))
    for _ in range(2):
        flat.check(index)
    (message,) = caplog.messages
    assert message.startswith(f"buffer '0.{name}' was made after wrapping: no checkpoint holds it")
    assert torch.equal(net[0].running_mean, torch.ones(4))


class Packed(nn.Module):
    """Weights in integers, as a quantized layer has them, and of a class of their own."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("qweight", values.to(torch.int8))
        self.weight = nn.Parameter(TwoTensor(values, values + 1), requires_grad=False)


@pytest.mark.parametrize("make", [lambda values: nn.Linear(32, 32, bias=False), Packed])
def test_the_digest_tells_bases_apart(make):
    def digest_of(seed: int, **changes: object) -> str:
        torch.manual_seed(seed)
        net = adapted(make(torch.randn(32, 32) * 9))
        if changes:
            next(iter(net["base"].state_dict().values()))[2, 4] += 1  # one in two is looked at
        before = {name: value.clone() for name, value in net["base"].state_dict().items()}
        flat = flatten(net)
        after = net["base"].state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert len(flat.state.segments) == 1
        return flat.base_digest

    assert digest_of(0) == digest_of(0) != digest_of(1)
    assert digest_of(0) != digest_of(0, changed=True)
    assert flatten(adapted(nn.Linear(8, 2, bias=False))).base_digest == "", "small, so averaged"
