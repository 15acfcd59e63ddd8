"""A whole training script in plain torch, as you would write it for your own task.

    gossipdp run -n 2 --status-port 9400 examples/complete.py
    torchrun --nproc-per-node 2 examples/complete.py
    python examples/complete.py

Call it again after a crash, or with more --epochs: it goes on from its last checkpoint. While the
first runs, `gossipdp top` shows its workers. `gossipdp report runs/complete` makes a page of a run.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

from gossipdp import Checkpoints, GossipDataParallel, Monitor, ProgressLR, parameter_groups


class Digits(Dataset):
    """Handwritten digits, each shifted by up to one pixel whenever it is drawn."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        shift = torch.randint(-1, 2, (2,)).tolist()
        return self.images[index].roll(shift, dims=(1, 2)), self.labels[index]


def make_net() -> nn.Sequential:
    first = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    second = nn.Conv2d(16, 32, 3, stride=2, bias=False), nn.BatchNorm2d(32), nn.ReLU()
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * 3 * 3, 10))


@torch.no_grad()
def accuracy_of(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    net.eval()
    return (net(images).argmax(dim=1) == labels).float().mean().item()


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--output", type=Path, default=Path("runs/complete"))
options = parser.parse_args()

digits = load_digits()
mixed = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[mixed] / 16
labels = torch.tensor(digits.target)[mixed]  # the last ones have other writers
data = Digits(images[:1440], labels[:1440])
valid = images[1440:], labels[1440:]

net = make_net()
# 0.9 for so short a run; 0.999 is usual in a long one.
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
optimizer = torch.optim.AdamW(parameter_groups(net, weight_decay=0.01), lr=5e-3)
model = GossipDataParallel(
    nn.ModuleList([net, ema]),  # so that the averages are averaged too
    optimizer,
    checkpoints=Checkpoints(options.output, every_steps=50, resume="auto"),
    monitor=Monitor(log_dir=options.output),
)
schedule = ProgressLR(optimizer, model, "one_cycle")
model.also_checkpoint(schedule=schedule)
order = torch.Generator().manual_seed(model.worker_seed)
# Without "fork" Python 3.14 asks for `if __name__ == "__main__":` above all this.
workers = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
loader = DataLoader(data, batch_size=32, shuffle=True, generator=order, **workers)

best_path, new_path = options.output / "best.pt", options.output / "best.new"
for epoch, batches in model.epochs(loader, options.epochs):
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        ema.update_parameters(net)
        schedule.step()
        model.log(loss=loss)
    if model.is_lead:  # the others train on meanwhile
        with model.averaged():
            accuracy = accuracy_of(ema, *valid)
            # From the file: another worker may have led before, in this start or an earlier one.
            best = torch.load(best_path)["accuracy"] if best_path.exists() else 0.0
            if accuracy > best:
                torch.save({"accuracy": accuracy, "net": ema.module.state_dict()}, new_path)
                new_path.replace(best_path)
        model.log(accuracy=accuracy)
        print(f"epoch {epoch}: accuracy {accuracy:.4f}", flush=True)

end = model.consolidate()  # from here on all workers hold the same average
print(f"worker {model.rank}: {end.samples} samples, accuracy {accuracy_of(ema, *valid):.4f}")
