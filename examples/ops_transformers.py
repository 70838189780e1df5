"""Replaces attention by Mamba-3 in every second layer of a Llama of transformers, and trains it with our loss.

    python examples/ops_transformers.py [--steps 20]

Needs transformers. The same works for a pretrained model, whose new layers then have to be trained.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from megacpp_mcore.ops import linear_cross_entropy
from megacpp_mcore.ops.layers import Mamba3


class Mixer(nn.Module):
    """Mamba-3 with the arguments and results of transformers' attention; it needs neither positions nor a causal mask."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.mamba = Mamba3(config.hidden_size, groups=2, depth=config.num_hidden_layers, eps=config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """``[B, S, D] -> [B, S, D]``, and no attention weights."""
        return self.mamba(hidden_states)[0], None


def main() -> None:
    """Train on a text that repeats."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.manual_seed(1)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=4, **sizes))
    for layer in model.model.layers[::2]:
        layer.self_attn = Mixer(model.config)
    text = torch.frombuffer(bytearray(__doc__.encode()), dtype=torch.uint8).long()[None, :256]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, args.steps + 1):
        hidden = model.model(text[:, :-1], use_cache=False).last_hidden_state
        loss = linear_cross_entropy(hidden, model.lm_head.weight, text[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
