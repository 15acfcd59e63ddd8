"""Training state: every bit comes back, nothing else is accepted, and nothing is unpickled."""

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gossipdp.parallel import training_state
from gossipdp.parallel.training_state import capture, decode, encode, restore

DTYPES = sorted(training_state._DTYPES, key=str)


def assert_bitwise(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(
            one.contiguous().reshape(-1).view(torch.uint8),
            other.contiguous().reshape(-1).view(torch.uint8),
        )
    elif isinstance(one, dict):
        assert [(type(key), key) for key in one] == [(type(key), key) for key in other]
        for key in one:
            assert_bitwise(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_bitwise(a, b)
    else:
        assert repr(one) == repr(other)  # tells -0.0 from 0.0, and takes NaN for NaN


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bits, any type, any shape, 0-dimensional and empty ones too, any order of memory."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    data = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    flat = torch.tensor(list(data), dtype=torch.uint8).view(dtype) if data else None
    tensor = torch.empty(shape, dtype=dtype) if flat is None else flat.reshape(shape)
    return tensor.permute(draw(st.permutations(range(tensor.dim()))))


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.text(st.characters(), max_size=8)
)
keys = st.integers(-99, 99) | st.text(max_size=5) | st.none()
states = st.recursive(
    scalars | tensors(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(states)
@settings(max_examples=200, deadline=None)
def test_what_is_decoded_is_what_was_encoded(state: Any) -> None:
    assert_bitwise(decode(encode(state)), state)


def test_nan_payloads_strides_and_sharing_survive() -> None:
    payload = torch.tensor([0x7FC12345, 0x7F800001], dtype=torch.int32).view(torch.float32)
    channels_last = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    state = {"payload": payload, "one": channels_last, "same": [channels_last]}
    decoded = decode(encode(state))
    assert torch.equal(decoded["payload"].view(torch.int32), payload.view(torch.int32))
    assert decoded["one"].stride() == channels_last.stride()
    assert decoded["same"][0] is decoded["one"]
    decoded["one"].add_(1)  # it is ours, and may be written


def test_dicts_of_other_classes_are_plain_ones_and_counters_count() -> None:
    counter = Counter([3, 3, 5])
    decoded = decode(encode({"ordered": OrderedDict(a=1), "counter": counter}))
    assert type(decoded["ordered"]) is dict
    assert list(decoded["counter"].elements()) == list(counter.elements())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1, 2}, r"state\['a'\]\[1\] is a builtins.set, which cannot be saved"),
        (len, r"state\['a'\]\[1\] is a builtins.builtin_function"),
        ({(1, 2): 3}, r"state\['a'\]\[1\] has a key \(1, 2\)"),
        (torch.ones(2).to_sparse(), r"state\['a'\]\[1\] is a torch.sparse_coo tensor"),
        (torch.ones(2, device="meta"), r"on meta, not dense data"),
        (torch.ones(2, dtype=torch.complex128), "torch.complex128, which cannot be saved"),
        (1 << 5000, r"state\['a'\]\[1\] is an integer of more than 4096 bits"),
        (1j, r"builtins.complex"),
    ],
)
def test_what_cannot_be_saved_is_named_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode({"a": [0, value]})


def test_a_state_within_itself_is_one_clear_error() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="nested deeper than 64, or within itself"):
        encode(loop)


ENCODED = encode({"state": {0: {"step": torch.tensor(3.0), "t": (1, [None, 2.5])}}, "x": "text"})


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_garbage_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="this is no training state"):
        decode(data)


@given(st.data())
@settings(max_examples=500, deadline=None)
def test_damage_is_a_value_error_or_another_state(data: st.DataObject) -> None:
    damaged = bytearray(ENCODED)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, 3))
    try:
        decode(bytes(damaged[: len(damaged) - cut]))
    except ValueError as error:
        assert str(error).startswith("this is no training state")  # noqa: PT017


def with_structure(structure: Any, **tensors: Tensor) -> bytes:
    text = structure if isinstance(structure, str) else json.dumps(structure)
    metadata = {"format": training_state.FORMAT, "structure": text}
    return safetensors.torch.save(tensors, metadata)


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ("[" * 100_000, "nested too deeply|Expecting"),
        (json.dumps({"tuple": []}).replace("[]", "[" * 80 + "]" * 80), "nested deeper than 64"),
        ("[" + "1" * 5000 + "]", "Exceeds the limit"),
        ("NaN", "NaN is not JSON"),
        ({"tensor": "b"}, "there is no tensor 'b'"),
        ({"tensor": ["a"]}, "there is no tensor"),
        ({"tensor": "a", "order": [0, 0]}, "the order of tensor 'a'"),
        ({"tensor": "a", "order": [True, 0]}, "the order of tensor 'a'"),
        ({"tensor": "a", "call": "os.system"}, "unknown attributes"),
        ({"object": []}, "unknown kind 'object'"),
        ({"dict": [], "tuple": []}, "an object with 2 keys"),
        ({"dict": [[1]]}, "a list of pairs"),
        ({"dict": [[[], 1]]}, "a key is a number or a text"),
        ({"dict": [["a", 1], ["a", 2]]}, "a key twice"),
        ({"counter": "abc"}, "a list was expected"),
        ({"float": "1e400"}, "nan, inf or -inf"),
        ([1, 2], "does not refer to tensor 'a'"),
    ],
)
def test_a_hostile_structure_is_refused(structure: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(with_structure(structure, a=torch.ones(2, 2)))


def test_lengths_are_checked_before_anything_is_allocated() -> None:
    huge = (1 << 62).to_bytes(8, "little")
    with pytest.raises(ValueError, match="a header of 4611686018427387904 bytes in"):
        decode(huge + b"{}")
    header = json.dumps(
        {
            "__metadata__": {"format": training_state.FORMAT, "structure": '{"tensor":"a"}'},
            "a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]},
        }
    ).encode()
    with pytest.raises(ValueError, match="this is no training state"):
        decode(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="this is no training state"):
        decode(b"\x80\x04cos\nsystem\n")


class Keeper(torch.optim.Optimizer):
    """Holds in its state what ``load_state_dict`` alone does not bring back."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": torch.tensor(0.1)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["exact"] = torch.randn(3, dtype=torch.float64)
                state["mask"] = torch.randn(2, 2) > 0
                state["nested"] = {"a": [torch.arange(3), "text", (1.5, None)]}
                state["note"] = "text"


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, torch.tensor(0.1)),
    "fused": lambda params: torch.optim.AdamW(params, 0.1, fused=True),
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
    "asgd": torch.optim.ASGD,
    "lbfgs": lambda params: torch.optim.LBFGS(params, history_size=3),
    "keeper": Keeper,
}


def stepped(name: str, steps: int, dtype: torch.dtype) -> torch.optim.Optimizer:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
    optimizer = OPTIMIZERS[name](list(net.parameters()))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(5, 3, dtype=dtype)).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_come_back_bitwise(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    one, other = stepped(name, 4, dtype), stepped(name, 1, dtype)
    restore(decode(encode(capture([one]))), [other])
    assert_bitwise(
        {"state": dict(other.state_dict()["state"]), "g": other.state_dict()["param_groups"]},
        {"state": dict(one.state_dict()["state"]), "g": one.state_dict()["param_groups"]},
    )


def test_the_state_of_other_optimizers_is_refused() -> None:
    state = decode(encode(capture([stepped("adamw", 1, torch.float32)])))
    for optimizers, message in [
        ([], "of 1 optimizers, and there are 0 here"),
        ([torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)], r"sizes \[4\], and .* have \[1\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            restore(state, optimizers)
    optimizer = stepped("sgd", 1, torch.float32)
    for wrong in (None, [], {"optimizers": 3}, {"optimizers": [{}]}):
        with pytest.raises(ValueError, match="state"):
            restore(wrong, [optimizer])
    wrong = {"optimizers": [{"state": {}, "param_groups": [{"params": [[], [], [], []]}]}]}
    with pytest.raises(ValueError, match="does not fit optimizer 0, a SGD"):
        restore(wrong, [optimizer])


def of_optimizer(**state: Any) -> dict[str, Any]:
    return {
        "optimizers": [{"state": {0: state}, "param_groups": [{"params": [0], "max": math.inf}]}]
    }


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_poison_is_found_wherever_an_optimizer_keeps_it(dtype, poison):
    sound = torch.ones(5, dtype=dtype)
    training_state.refuse_poison(of_optimizer(mean=sound, step=torch.tensor(7), best=math.inf))
    poisoned = sound.clone()
    poisoned[-1] = poison
    with pytest.raises(ValueError, match=r"optimizer 0's state\[0\]\['old'\]\[1\] holds NaN"):
        training_state.refuse_poison(of_optimizer(mean=sound, old=[sound, poisoned]))


def test_poison_is_found_in_eight_bits_and_sums_that_overflow_are_none():
    eight = torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="holds NaN"):
        training_state.refuse_poison(of_optimizer(mean=eight))
    training_state.refuse_poison(of_optimizer(mean=torch.full((9,), 3e38)))


@pytest.mark.parametrize("state", [None, 3, {"optimizers": 5}, {"optimizers": [None, {}]}])
def test_what_is_no_state_is_left_to_whoever_restores_it(state):
    training_state.refuse_poison(state)
