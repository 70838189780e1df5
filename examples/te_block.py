"""Trains a language model of two of Transformer Engine's attention blocks on Python's own sources, without Megatron.

    python examples/te_block.py [--steps 50]

:class:`megacpp_mcore.te.block.Block` is LayerNormLinear, DotProductAttention, Linear and LayerNormMLP; it needs a GPU.

Shape legend: B batch, S sequence, D hidden.
"""

from __future__ import annotations

import argparse

import torch
from ops_loop import BYTES, HIDDEN, batches
from torch import Tensor, nn

from megacpp_mcore.ops import linear_cross_entropy
from megacpp_mcore.te.block import Block
from megacpp_mcore.util import te_imports

HEADS, GROUPS, FFN = 4, 2, 384


class Transformer(nn.Module):
    """Two blocks between an embedding and the loss. Attention has no positions: a causal convolution mixes neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(BYTES, HIDDEN), nn.Linear(HIDDEN, BYTES, bias=False)
        self.neighbours = nn.Conv1d(HIDDEN, HIDDEN, 4, padding=3, groups=HIDDEN)
        self.blocks = nn.ModuleList(Block(HIDDEN, HEADS, FFN, groups=GROUPS, activation="swiglu") for _ in range(2))

    def forward(self, tokens_BS: Tensor, label_BS: Tensor) -> Tensor:
        """Return the loss."""
        hidden_BSD = self.embedding(tokens_BS)
        mixed_BDS = self.neighbours(hidden_BSD.transpose(1, 2))[..., : tokens_BS.size(1)]
        hidden_SBD = (hidden_BSD + mixed_BDS.transpose(1, 2)).transpose(0, 1)
        for block in self.blocks:
            hidden_SBD = block(hidden_SBD)
        return linear_cross_entropy(hidden_SBD.transpose(0, 1).contiguous(), self.head.weight, label_BS)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    te_imports.configure(te_imports.Features(), "the example")
    torch.manual_seed(1)
    model = Transformer().to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    for step, (tokens, label) in zip(range(1, args.steps + 1), batches("cuda"), strict=False):
        loss = model(tokens, label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, args.steps):
            print(f"step {step}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
