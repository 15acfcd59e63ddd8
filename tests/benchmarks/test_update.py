"""update.py: what it compares with, and its figures."""

import pytest
import torch
from reference import PaperState
from update import ALPHA_TILDE, ETA, Released, measure

from gossipdp.dynamics.update import KERNELS


def test_the_released_sequence_is_the_paper_s_equation():
    generator = torch.Generator().manual_seed(0)
    x, peers = (torch.randn(1000, generator=generator) for _ in range(2))
    released, reference = Released(x.clone(), peers), PaperState(x.double(), x.double())
    for _ in range(3):
        released.exchange()
        flowed = reference.flow(ETA, 1.0)
        reference = flowed.exchange(flowed.x - peers.double(), ALPHA_TILDE)
    assert torch.allclose(released.x.double(), reference.x, atol=1e-5)
    assert torch.allclose(released.x_tilde.double(), reference.x_tilde, atol=1e-5)


def test_the_figures_of_a_small_model(monkeypatch):
    monkeypatch.delenv("GOSSIPDP_KERNELS", raising=False)
    result = measure(300_000, 1)  # two chunks
    medians = {name: spread.median for name, spread in result["ms"].items()}
    assert {f"{name}: one pass" for name in KERNELS} < {*medians}
    assert result["kernels"] == "torch"  # the model is small
    copy_ms = min(medians["copy, torch"], medians["copy, C library"])
    # Seven passes against the two of a copy.
    assert result["copy_bound_ms"] == pytest.approx(copy_ms * 7 / 2)
