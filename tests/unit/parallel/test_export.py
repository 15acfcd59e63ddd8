"""The averaged model as a file that needs nothing of ours to be loaded."""

import os

import mixed_net
import pytest
import safetensors.torch
import torch
from checkpointing import full
from torch import Tensor, nn

from gossipdp.parallel.checkpoint_files import Average, _average_of, write_average


class Net(mixed_net.Net):
    """And 0-dimensional, in channels_last; and much that a file must not drag along."""

    def __init__(self, extra=None):
        super().__init__()
        self.conv.to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.large = nn.Linear(300, 300)
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.fixture
def make(wrap_sgd):
    torch.manual_seed(0)
    return lambda extra=None: wrap_sgd(Net(extra))[0]


@pytest.mark.parametrize("consolidated", [False, True])
def test_a_pt_file_loads_with_weights_only(make, tmp_path, consolidated):
    model = make({"note": [1, 2.5]})
    if consolidated:
        model.consolidate()
    path = tmp_path / "runs" / "of today" / "model.pt"  # folders that are not there yet
    model.save_averaged(path)
    loaded = torch.load(path, weights_only=True)
    assert_same(loaded, model.module)
    assert_same(model.state_dict(), model.module)
    assert _average_of(path) == Average(model._worker.run_id, 0, 0, consolidated, int(consolidated))
    other = Net()
    other.load_state_dict(loaded)
    assert other.extra == {"note": [1, 2.5]}
    # Tied tensors are held once, and the larger storage that they are views of is not.
    assert loaded["inner.weight"].data_ptr() == loaded["tied.weight"].data_ptr()
    tensors = {t.data_ptr(): t.nbytes for t in loaded.values() if isinstance(t, Tensor)}
    assert path.stat().st_size < sum(tensors.values()) + 20_000


def test_a_safetensors_file_loads_under_every_name(make, tmp_path):
    model = make()
    model.module.get_extra_state = lambda: torch.ones(2)
    path = tmp_path / "runs" / "model.safetensors"
    model.save_averaged(path)
    assert_same(safetensors.torch.load_file(path), model.module)


def assert_same(loaded: dict[str, object], net: nn.Module) -> None:
    state = net.state_dict()
    assert loaded.keys() == state.keys()
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    torch.testing.assert_close({name: loaded[name] for name in tensors}, tensors, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_the_average_of_more_samples_of_one_run_stays(tmp_path, caplog, name):
    """Of two sides of a cut network that both ended, whichever saves first."""

    def save(rank, *, samples, value, run_id="a", is_end=True, num_workers=1):
        average = Average(run_id, samples, rank, is_end, num_workers)
        return write_average(tmp_path / name, {"x": torch.full((3,), value)}, average)

    def held(path):
        load = torch.load if path.suffix == ".pt" else safetensors.torch.load_file
        return float(load(path)["x"][0])

    path = save(3, samples=90, value=4.0, is_end=False)
    assert path == tmp_path / name
    assert save(0, samples=50, value=5.0) == path, "what is saved in mid training does not stay"
    assert save(1, samples=60, value=6.0) == path
    assert save(1, samples=60, value=6.0) == path, "the same average, from another of its workers"
    assert not caplog.records
    for rank, samples in ((0, 50), (2, 60)):
        beside = save(rank, samples=samples, value=7.0)
        assert beside.name == f"model-of-worker-{rank}{path.suffix}"
        assert (held(path), held(beside)) == (6.0, 7.0)
        assert f"{path} stays" in caplog.messages[-1]
        assert "60 samples, under worker 1" in caplog.messages[-1]
    assert held(save(1, samples=60, value=8.0)) == 8.0, "its own"
    assert save(0, samples=1, value=9.0, run_id="b") == path
    assert held(path) == 9.0
    assert save(1, samples=1, value=10.0, run_id="b", num_workers=2) == path
    beside = save(2, samples=5, value=11.0, run_id="b")
    assert beside.name == f"model-of-worker-2{path.suffix}", "it trained on after the others' end"
    assert held(path) == 10.0


def test_what_cannot_be_written_is_one_clear_error_and_no_file(make, tmp_path, monkeypatch):
    model = make({"note": 1})
    with pytest.raises(ValueError, match="'_extra_state' is a dict"):
        model.save_averaged(tmp_path / "model.safetensors")
    model.save_averaged(tmp_path / "model.pt")
    before = (tmp_path / "model.pt").read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        model.save_averaged(tmp_path / "model.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
    assert (tmp_path / "model.pt").read_bytes() == before
    model.close()
    with pytest.raises(RuntimeError):  # closed without an average
        model.save_averaged(tmp_path / "late.pt")
