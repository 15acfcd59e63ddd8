"""The script of docs/two_machines.md: digits, on the card of each machine if it has one."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from gossipdp import Checkpoints, GossipDataParallel, ProgressLR

device = "cuda" if torch.cuda.is_available() else "cpu"
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
held_out = torch.arange(len(labels)) % 5 == 0  # every fifth image
data = TensorDataset(images[~held_out], labels[~held_out])

net = nn.Sequential(
    nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
).to(device)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
saving = Checkpoints("checkpoints", every_steps=100, resume="auto")
model = GossipDataParallel(net, optimizer, checkpoints=saving)
schedule = ProgressLR(optimizer, model, "cosine", warmup=0.05)
model.also_checkpoint(schedule=schedule)
order = torch.Generator().manual_seed(model.worker_seed)
loader = DataLoader(data, batch_size=32, shuffle=True, generator=order)


def accuracy():
    with torch.no_grad():
        found = net(images[held_out].to(device)).argmax(1).cpu()
    return (found == labels[held_out]).float().mean().item()


for epoch, batches in model.epochs(loader, 100):
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        schedule.step()
        model.log(loss=loss)
    if model.is_lead and epoch % 20 == 19:
        with model.averaged():
            print(f"epoch {epoch}: accuracy {accuracy():.4f}")
end = model.consolidate()
print(f"worker {model.rank}: {end.samples:,} samples by {end.world_size} workers, {accuracy():.4f}")
model.save_averaged("model.pt")
