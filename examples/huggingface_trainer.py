"""Handwritten digits under the Trainer of Hugging Face transformers.

    gossipdp run -n 4 examples/huggingface_trainer.py
    torchrun --nproc-per-node 4 examples/huggingface_trainer.py

Each worker goes through all the data, in an order of its own.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from transformers import Trainer, TrainingArguments

from gossipdp import Exchange
from gossipdp.integrations import single_process
from gossipdp.integrations.transformers import GossipCallback

digits = load_digits()
order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order] / 16
labels = torch.tensor(digits.target)[order]
train = [{"images": i, "labels": n} for i, n in zip(images[:1437], labels[:1437], strict=True)]


class Classifier(nn.Module):
    """Returns the loss too, as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(32)
        self.first = nn.Conv2d(1, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 32, 3, stride=2)
        self.out = nn.Linear(32 * 3 * 3, 10)

    def forward(self, images, labels):
        """Map images (batch, 1, 8, 8) and labels (batch,) to the loss and logits (batch, 10)."""
        logits = self.out(self.second(self.norm(self.first(images)).relu()).flatten(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


with single_process() as worker:
    args = TrainingArguments(
        "runs/huggingface_trainer",
        use_cpu=True,
        seed=worker.seed,
        per_device_train_batch_size=32,
        max_steps=100_000,  # the budget ends training before
        lr_scheduler_type="constant",
        report_to="none",
        save_strategy="no",
    )
net = Classifier()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
gossip = GossipCallback(budget_samples=20 * 1437, exchange=Exchange(pace="strict"))
Trainer(net, args, train_dataset=train, optimizers=(optimizer, None), callbacks=[gossip]).train()

net.eval()
logits = net(images[1437:], labels[1437:])["logits"]
accuracy = (logits.argmax(dim=1) == labels[1437:]).float().mean().item()
print(f"worker {gossip.model.rank}: accuracy {accuracy:.4f}")
