"""What computes in a shared state, and both ways through one exchanged chunk."""

import math
import sys

import pytest
import torch

from gossipdp.dynamics import arithmetic
from gossipdp.dynamics.arithmetic import has_numba
from gossipdp.dynamics.phase import Phase
from gossipdp.dynamics.state import Role, Segment, State
from gossipdp.runtime.shared_state import SharedState


def make_shared(*dtypes: torch.dtype) -> SharedState:
    generator = torch.Generator().manual_seed(0)
    segments = [
        Segment(torch.randn(100, generator=generator).to(dtype), Role.TRAINED, chunk_bytes=256)
        for dtype in dtypes
    ]
    shared = SharedState(State(segments), Phase(0.4, 1.0), lambda: 0.0)
    for segment in segments:
        assert segment.c is not None
        segment.c.copy_(torch.randn(100, generator=generator))
    for chunk in shared.state.chunks:
        chunk.restored()
    return shared


def test_small_models_are_computed_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOSSIPDP_KERNELS", raising=False)
    assert make_shared(torch.float32, torch.bfloat16).kernels == "torch"


@pytest.mark.skipif(not has_numba(), reason="numba is not installed")
def test_the_variable_decides_and_what_runs_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSIPDP_KERNELS", "numba")
    assert make_shared(torch.float32).kernels == "numba"
    assert make_shared(torch.float32, torch.float64).kernels == "numba, torch"
    mixed = make_shared(torch.float32, torch.float16, torch.bfloat16)
    for wire in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        mixed.prepare(wire)
    monkeypatch.setenv("GOSSIPDP_KERNELS", "fast")
    with pytest.raises(ValueError, match="GOSSIPDP_KERNELS is 'fast'"):
        make_shared(torch.float32)


def test_numba_asked_for_and_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSIPDP_KERNELS", "numba")
    monkeypatch.setattr(arithmetic, "has_numba", lambda: False)
    with pytest.raises(ValueError, match="not installed"):
        make_shared(torch.float32)


def test_a_chunk_whose_peer_was_there_first_ends_as_any_other() -> None:
    apart, at_once = make_shared(torch.float32), make_shared(torch.float32)
    for shared in (apart, at_once):
        shared._phase._theta = 0.3
        assert shared.start_exchange() == 0.3
    for one, other in zip(apart.state.chunks, at_once.state.chunks, strict=True):
        peers = torch.ones(one.num_elements)
        mine, out = torch.empty_like(peers), torch.empty_like(peers)
        assert apart.snapshot(one, 0.3, mine)
        norm = apart.exchange(one, mine, peers, 1.3)
        assert at_once.snapshot_and_exchange(other, out, peers, 1.3) == norm
        assert torch.equal(mine, out)
    (one,), (other,) = apart.state.segments, at_once.state.segments
    assert torch.equal(one.pending, other.pending)
    assert one.c is not None
    assert other.c is not None
    assert torch.equal(one.c, other.c)
    for shared in (apart, at_once):
        shared.boundary()
    assert torch.equal(one.x, other.x)


def test_after_a_reset_a_phase_that_begins_anew_flows() -> None:
    shared = make_shared(torch.float32)
    chunk = shared.state.chunks[0]
    chunk.theta = 50.0
    shared.reset()
    shared._phase._theta = 0.3
    theta = shared.start_exchange()
    mine, peers = torch.empty(chunk.num_elements), torch.ones(chunk.num_elements)
    assert shared.snapshot(chunk, theta, mine)
    shared.exchange(chunk, mine, peers, 1.3)
    assert chunk.c is not None
    before = chunk.c.clone()
    chunk.flow_to(1.3)
    assert torch.equal(chunk.c, before * math.exp(-2.0))


def test_a_snapshot_says_whether_all_is_finite() -> None:
    shared = make_shared(torch.float32)
    chunk = shared.state.chunks[1]
    out = torch.empty(chunk.num_elements)
    assert shared.snapshot(chunk, 0.0, out)
    chunk.x[3] = math.nan
    assert not shared.snapshot(chunk, 0.0, out)
    before = chunk.pending.clone()
    assert not math.isfinite(shared.snapshot_and_exchange(chunk, out, torch.ones_like(out), 1.3))
    assert math.isnan(out[3])
    assert torch.equal(chunk.pending, before)


def test_a_numba_that_cannot_be_imported_is_told_of_and_not_needed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arithmetic, "has_numba", lambda: True)
    monkeypatch.setattr(arithmetic, "LEAST_COMPILED_VALUES", 1)
    monkeypatch.setitem(sys.modules, "gossipdp.dynamics.numba_arithmetic", None)
    monkeypatch.delenv("GOSSIPDP_KERNELS", raising=False)
    assert make_shared(torch.float32).kernels == "torch"
    assert "numba cannot be imported" in caplog.text
    monkeypatch.setenv("GOSSIPDP_KERNELS", "numba")
    with pytest.raises(ImportError):
        make_shared(torch.float32)
