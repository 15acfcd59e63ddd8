"""Four workers as actors on a Ray cluster; Ray restarts each that dies.

python ray_digits.py                     on a Ray of this machine, made for this run
python ray_digits.py --address auto      on the cluster that this machine is part of
python ray_digits.py --tls DIR           with the files of `gossipdp tls-init DIR` on every node
"""

import argparse

import ray

from gossipdp.integrations.ray import launch


def train(budget_samples: int, tls: str | None) -> tuple[float, float]:
    """One worker's life; the accuracy of the average, and the achieved exchange rate."""
    import torch
    from sklearn.datasets import load_digits

    from gossipdp import GossipDataParallel, Network

    digits = load_digits()
    mixed = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    inputs = torch.tensor(digits.data, dtype=torch.float32)[mixed] / 16
    labels = torch.tensor(digits.target)[mixed]  # the last ones have other writers
    training = torch.utils.data.TensorDataset(inputs[:1437], labels[:1437])
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    network = Network(tls=tls or None)
    model = GossipDataParallel(
        net, optimizer, graph="ring", budget_samples=budget_samples, network=network
    )
    order = torch.Generator().manual_seed(model.worker_seed)
    loader = torch.utils.data.DataLoader(training, batch_size=32, shuffle=True, generator=order)
    for batch, targets in model.batches(loader):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch), targets).backward()
        optimizer.step()
    rate = model.stats().achieved_comm_rate
    model.consolidate()
    with torch.no_grad():
        accuracy = (net(inputs[1437:]).argmax(1) == labels[1437:]).float().mean().item()
    return accuracy, rate


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", help="of a Ray cluster; by default one is made here")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=200_000, help="of all workers together")
    parser.add_argument("--tls", help="directory that gossipdp tls-init made, on every node")
    words = parser.parse_args()
    if words.address:
        ray.init(address=words.address)
    else:
        ray.init(num_cpus=words.workers, include_dashboard=False)
    results = launch(train, words.workers, args=(words.samples, words.tls), max_restarts=3)
    for rank, (accuracy, rate) in enumerate(results):
        print(f"worker {rank}: test accuracy {accuracy:.4f}, achieved comm rate {rate:.2f}")
