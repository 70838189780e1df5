"""The model of an export on a GPU, where transformers is installed: with this package's kernels and without, with drafts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from megacpp_mcore.huggingface.configuration_nam56r import NAM56RConfig
from megacpp_mcore.huggingface.modeling_nam56r import NAM56RForCausalLM

LENGTH = 96


@pytest.fixture(scope="module")
def model() -> Any:
    """One layer of each kind, at the widths that the kernels are for, in bf16."""
    torch.manual_seed(1)
    config = NAM56RConfig(
        vocab_size=512, hidden_size=512, pattern="AMRAE", attention_roles="-..F.", num_attention_heads=8,
        intermediate_size=512, index_n_heads=8, index_topk=48, mamba_heads=16, mamba_groups=2, rnn_heads=8,
        moe_intermediate_size=256, shared_expert_intermediate_size=256, mtp_depth=1,
    )  # fmt: skip
    made = NAM56RForCausalLM(config).cuda().eval()
    for name, weight in made.named_parameters():
        if "mixer.W" in name:
            weight.data = torch.randn_like(weight) / 8
        if not any(kept in name for kept in made._keep_in_fp32_modules_strict):  # as from_pretrained does
            weight.data = weight.data.bfloat16()
    return made


def test_kernels_change_roundings_only(model: Any) -> None:
    tokens = torch.randint(512, (2, LENGTH), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    all_logits = {}
    with torch.no_grad():
        for kernels in (True, False):
            model.config.kernels = kernels
            all_logits[kernels] = model(tokens, use_cache=False).logits.float()
            first = model(tokens[:, :40], use_cache=True)
            pieces = [tokens[:, 40:43], *tokens[:, 43:].split(1, dim=1)]
            rest = [model(piece, past_key_values=first.past_key_values).logits for piece in pieces]
            all_logits[f"{kernels} in pieces"] = torch.cat([first.logits, *rest], dim=1).float()
        exact = copy.deepcopy(model).float()(tokens, use_cache=False).logits
    scale = exact.square().mean().sqrt()
    errors = {name: float((logits - exact).square().mean().sqrt() / scale) for name, logits in all_logits.items()}
    assert max(errors.values()) < 2 * errors[False], errors


def test_drafts_leave_the_tokens(model: Any) -> None:
    """In float32: equal logits in bf16 make either token right."""
    prompt = torch.randint(512, (1, 20), device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    exact = copy.deepcopy(model).float()
    exact.config.kernels = None
    options = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    plain, counts = exact.generate(prompt, **options), {}
    drafted = exact.generate(prompt, **options, custom_generate=type(exact).speculate, drafts=2, counts=counts)
    assert torch.equal(plain, drafted)
    assert counts["drafted"] > 0
