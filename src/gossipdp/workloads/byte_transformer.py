"""A small decoder-only transformer over bytes, with tied embeddings."""

from typing import final

import torch
from torch import Tensor, nn

NUM_BYTES = 256


@final
class ByteTransformer(nn.Module):
    """Bytes of shape (batch, length) to logits of the next byte, (batch, length, 256).

    The output layer shares its weight with the embedding: one parameter under two names.
    """

    def __init__(self, *, width: int, depth: int, num_heads: int, context: int) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"width {width} is not a multiple of num_heads {num_heads}")
        self.embedding = nn.Embedding(NUM_BYTES, width)
        self.position = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.Sequential(*(_Block(width, num_heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.position[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits


class _Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        joint = self.queries_keys_values(self.norm_attention(hidden))
        heads = joint.view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(
            heads[0], heads[1], heads[2], is_causal=True
        )
        hidden = hidden + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = hidden + self.mlp(hidden)
        return result
