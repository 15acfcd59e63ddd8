import torch
from torch import nn


class Net(nn.Module):
    """Every kind of tensor that is saved: tied, frozen, strided, integer; and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.2)
        self.inner = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.inner.weight
        self.frozen = nn.Linear(4, 3)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(4, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.drop(self.norm(self.conv(images)).relu()).mean(dim=(2, 3))
        features = self.tied(self.inner(features).relu())
        return self.head(features) + self.frozen(features)
