"""Layouts of states: every bit comes back, and a hostile layout is refused."""

import sys
from collections import Counter, OrderedDict

import msgspec
import pytest
import torch
from bitwise import assert_bitwise, there_and_back
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Ext
from torch import Tensor

from gossipdp.gossip.transfer import MAX_LAYOUT_BYTES
from gossipdp.parallel import packing
from gossipdp.parallel.packing import Mark, pack, unpack
from gossipdp.parallel.training_state import Arriving

DTYPES = sorted(packing.DTYPES.values(), key=str)


def unpacked(layout: bytes, tensors: list[Tensor]):
    """Unpack a state into these tensors; a further one finds no room."""
    rest = iter(tensors)
    return unpack(layout, lambda _: next(rest, torch.empty(0)))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Draw any bits, type, shape (0-dimensional and empty too) and order of memory."""
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
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats() | st.text(max_size=8)
)
keys = st.integers(-99, 99) | st.text(max_size=5) | st.none() | st.floats()
states = st.recursive(
    scalars | tensors(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(states, st.sampled_from([0, 16, 1000]))
@example({-(1 << 63): -(1 << 63) - 1, (1 << 64) - 1: [1 << 64, (1 << 2048) - 1]}, 16)
@example([torch.empty(0), torch.ones(4), torch.arange(6.0).view(2, 3).T], 16)  # 0, 16, 24 bytes
@example(msgspec.msgpack.decode(b"\x91" * 64 + b"\x01"), 16)
@settings(max_examples=80, deadline=None)
def test_what_comes_back_is_what_was_packed(state, inline_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "INLINE_BYTES", inline_bytes)
        assert_bitwise(there_and_back(state), state)
        assert all(flat.nbytes > inline_bytes for flat in pack(state)[1])


def test_a_layout_is_message_pack_with_four_marks():
    """Files of earlier versions hold the same bytes."""
    expected = {
        "plain": [-(1 << 63), (1 << 64) - 1, 0.5],
        "tuple": [Ext(1, b""), True],
        "counter": [Ext(2, b""), {"x": 2}],
        "tensor": Ext(3, msgspec.msgpack.encode(["U8", [2], [], b"\1\2"])),
        "integer": Ext(4, b"\0\0\0\0\0\0\0\0\1"),
        None: {True: 1, 0.5: 2},
    }
    state = {
        **expected,
        "tuple": (True,),
        "counter": Counter("xx"),
        "tensor": torch.tensor([1, 2], dtype=torch.uint8),
        "integer": 1 << 64,
    }
    assert pack(state) == (msgspec.msgpack.encode(expected), [])
    assert_bitwise(there_and_back(state), state)


def test_dicts_of_other_classes_are_plain_ones():
    assert type(there_and_back(OrderedDict(a=1))) is dict


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1, 2}, r"state\['a'\]\[1\] is a builtins.set, which cannot be saved"),
        ({(1, 2): 3}, r"a key of state\['a'\]\[1\] is a builtins.tuple"),
        (torch.ones(2).to_sparse(), r"state\['a'\]\[1\] is a torch.sparse_coo tensor"),
        (torch.ones(2, device="meta"), r"on meta, not dense data"),
        (torch.ones(2, dtype=torch.complex128), "torch.complex128, which cannot be saved"),
        (1 << 2048, r"state\['a'\]\[1\] is an integer of more than 2048 bits"),
        ("\ud800", "surrogates"),
        (1j, r"builtins.complex"),
        ({1 << 64: 1}, r"a key of state\['a'\]\[1\] is a builtins.int, which cannot be saved"),
        ({-(1 << 63) - 1: 1}, r"a key of state\['a'\]\[1\] is a builtins.int, which cannot"),
        (msgspec.msgpack.decode(b"\x91" * 63 + b"\x01"), "nested deeper than 64, or within itself"),
    ],
)
def test_what_cannot_be_saved_is_named_with_its_place(value, message):
    with pytest.raises(ValueError, match=message):
        pack({"a": [0, value]})


def tensor(dtype="F32", shape=(2, 2), *rest) -> Ext:
    return Ext(Mark.TENSOR, msgspec.msgpack.encode([dtype, shape, *rest]))


TOO_DEEP = "recursion" if sys.version_info < (3, 14) else "Stack overflow"
TUPLE, COUNTER = Ext(Mark.TUPLE, b""), Ext(Mark.COUNTER, b"")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (b"\x91" * 100_000, TOO_DEEP),
        (b"\x91" * 65 + b"\x01", "nested deeper than 64"),
        (b"\x92\xd4\x01\x00" * 65 + b"\x01", "nested deeper than 64"),
        (b"\x81\x01" * 65 + b"\x01", "nested deeper than 64"),
        (b"\x01\x02", "trailing"),
        ([b"bytes"], "a layout holds a bytes"),
        (Ext(77, b""), "a layout holds a Ext"),
        (Ext(Mark.INTEGER, bytes(258)), "a layout holds a Ext"),
        ([[], TUPLE], "a layout holds a Ext"),
        ([COUNTER, []], "a layout holds a Ext"),
        ([COUNTER, {}, {}], "a layout holds a Ext"),
        ({(1, 2): 3}, "a key in a layout is a tuple"),
        ({b"key": 3}, "a key in a layout is a bytes"),
        (tensor(dtype="object"), "unknown type 'object'"),
        (tensor(shape=[-1]), ">= 0"),
        (tensor(shape=[1 << 30, 1 << 30]), "a shape that no tensor has"),
        (tensor(shape=[(1 << 64) - 1, 0]), "a shape that no tensor has"),
        (tensor(shape=[1] * 65), "a shape that no tensor has"),
        (tensor("F32", [2, 2], [0, 0]), "the order of a tensor"),
        (tensor("F32", [2, 2], [], b"123"), "3 bytes of a tensor that takes 16"),
        (tensor("F32", [2, 2], [], None, "os.system"), "at most length"),
        (Ext(Mark.TENSOR, b""), "truncated"),
        (tensor(shape=[(1 << 60) - 1, *[1] * 63]), "not what is described"),
        (tensor(dtype="I32"), "not what is described"),
    ],
)
def test_a_hostile_layout_is_refused(layout, message):
    layout = layout if isinstance(layout, bytes) else msgspec.msgpack.encode(layout)
    with pytest.raises(ValueError, match=message):
        unpacked(layout, [torch.ones(2, 2)])


def test_lengths_are_known_before_anything_is_allocated():
    with pytest.raises(ValueError, match="at most 16777216 are read"):
        unpacked(bytes(MAX_LAYOUT_BYTES + 1), [])
    with pytest.raises(ValueError, match="takes more than"):
        Arriving(1 << 40).unfold(msgspec.msgpack.encode(tensor(shape=[1 << 40])))
    with pytest.raises(ValueError, match="of state takes 16777217 bytes, more than 16777216; hold"):
        pack("a" * (MAX_LAYOUT_BYTES - 4))
    assert unpacked(*pack("a" * (MAX_LAYOUT_BYTES - 5)))
