"""Trains a hybrid model of plain PyTorch on Python's own sources, with the ops and layers of this package, without Megatron.

    python examples/ops_loop.py [--steps 50] [--device cpu|cuda]

The loop is what torchtitan and others have: a model, AdamW, a learning rate that warms up, clipped gradients.

Shape legend: B batch, S sequence, D hidden, E experts.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from megacpp_mcore.ops import linear_cross_entropy, rms_norm, routed_mlp
from megacpp_mcore.ops.layers import M2RNN, Mamba3, SparseMLA

HIDDEN, EXPERTS, TOPK, BATCH, LENGTH, BYTES = 128, 4, 2, 4, 64, 256
INDEXER = 0.01
"""Factor on the loss of the indexer."""


class Experts(nn.Module):
    """A router and its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, HIDDEN) * HIDDEN**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * HIDDEN) * (4 * HIDDEN) ** -0.5)

    def forward(self, hidden_BSD: Tensor) -> tuple[Tensor, None]:
        """``[B, S, D] -> [B, S, D]``."""
        x_TD = hidden_BSD.flatten(0, 1)
        probs_TE = self.router(x_TD).float().softmax(-1)
        routing_TE = torch.zeros_like(probs_TE, dtype=torch.bool).scatter(1, probs_TE.topk(TOPK).indices, True)
        out_TD = routed_mlp(x_TD, routing_TE, probs_TE, self.up, self.down, topk=TOPK)
        return out_TD.view_as(hidden_BSD), None


class Hybrid(nn.Module):
    """Attention, Mamba-3, M²RNN, and experts after each."""

    def __init__(self) -> None:
        super().__init__()
        depth = 6
        self.embedding, self.head = nn.Embedding(BYTES, HIDDEN), nn.Linear(HIDDEN, BYTES, bias=False)
        mixers = (
            SparseMLA(HIDDEN, heads=4, topk=32, index_heads=4, depth=depth),
            Mamba3(HIDDEN, groups=2, depth=depth),
            M2RNN(HIDDEN, heads=4, depth=depth),
        )
        self.mixers = nn.ModuleList(layer for mixer in mixers for layer in (mixer, Experts()))
        self.norms = nn.ParameterList(torch.ones(HIDDEN) for _ in range(depth + 1))

    def forward(self, tokens_BS: Tensor, label_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, and the indexer's."""
        hidden = self.embedding(tokens_BS)
        indexer = hidden.new_zeros(())
        for norm, mixer in zip(self.norms, self.mixers, strict=False):
            normed, residual = rms_norm(hidden, norm)
            out, more = mixer(normed)
            hidden = residual + out
            if isinstance(mixer, SparseMLA):
                indexer = indexer + more
        normed, _ = rms_norm(hidden, self.norms[-1])
        return linear_cross_entropy(normed, self.head.weight, label_BS), indexer


def batches(device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows of Python's standard library with the next bytes as labels; the end of a file does not count."""
    text = b"".join(path.read_bytes() + b"\0" for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    stream, generator = torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), torch.Generator().manual_seed(1)
    while True:
        first = torch.randint(len(stream) - LENGTH, (BATCH, 1), generator=generator)
        rows = stream[first + torch.arange(LENGTH + 1)].to(device)
        label = rows[:, 1:]
        yield rows[:, :-1], label.masked_fill(label == 0, -100)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(1)
    model = Hybrid().to(args.device, torch.bfloat16 if args.device == "cuda" else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    for step, (tokens, label) in zip(range(1, args.steps + 1), batches(args.device), strict=False):
        loss, indexer = model(tokens, label)
        (loss + INDEXER * indexer).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 10 == 0 or step == args.steps:
            print(f"step {step}  loss {loss.item():.4f}  indexer {indexer.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
