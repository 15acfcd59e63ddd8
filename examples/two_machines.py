"""The script of docs/two_machines.md: digits, on the card of each machine if it has one."""

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from gossipdp import Checkpoints, GossipDataParallel, ProgressLR

device = "cuda" if torch.cuda.is_available() else "cpu"
images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32, device=device) / 16
labels = torch.tensor(labels, device=device)
held_out = torch.arange(len(labels), device=device) % 5 == 0  # every fifth image
data = TensorDataset(images[~held_out], labels[~held_out])

net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
net.to(device)
optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
saving = Checkpoints("checkpoints", every_steps=100, resume="auto")
model = GossipDataParallel(net, optimizer, checkpoints=saving)
schedule = ProgressLR(optimizer, model, "cosine", warmup=0.05)
model.also_checkpoint(schedule=schedule)
order = torch.Generator().manual_seed(model.worker_seed)
loader = DataLoader(data, batch_size=32, shuffle=True, generator=order)


def accuracy():
    with torch.no_grad():
        found = net(images[held_out]).argmax(1)
    return (found == labels[held_out]).float().mean().item()


for epoch, batches in model.epochs(loader, 60):
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
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
