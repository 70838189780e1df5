"""Models of long rows: windows of attention, YaRN's rotary embedding, in the layers that stock Megatron builds.

Shape legend: S sequence, B batch, H heads, R rotary width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp_mcore.checkpoints import layout
from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.launch.schedule_search import Schedules
from megacpp_mcore.layer_specs.mla import rotation
from megacpp_mcore.model import preset, with_overrides
from megacpp_mcore.model.training import GPT, HYBRID
from tests import micro_batch, stock
from tests.errors import raises
from tests.layer_specs.test_decode import in_pieces, logits

S, WINDOW = 48, 7
YARN = {"rotary_scaling_factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "mscale_all_dim": 0.8}
LONG = {"seq_length": S, "mla": {"window_size": WINDOW, "yarn": YARN}, "dsa": {"topk": 8}}
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def make(process: Path) -> Make:
    def build(*words: str, model_class: str = GPT, **overrides: Any) -> Any:
        model = stock.build(LONG | overrides, preset("nam56r_tiny_long"), process, *words, model_class=model_class)
        return stock.stirred(model)

    return build


@pytest.fixture(scope="module")
def built(make: Make) -> Any:
    return make()


@pytest.fixture(scope="module")
def alone(make: Make) -> Any:
    """One A layer with a window."""
    return make(depth=1, pattern="A", dsa={"schedule": "W"}, mtp={"depth": 0})


def core(attention: Any) -> Any:
    return attention.self_attention.core_attention


@pytest.mark.parametrize("model_class", [GPT, HYBRID])
def test_the_layers_of_the_preset(make: Make, model_class: str) -> None:
    model = make(model_class=model_class)
    roles = preset("nam56r_tiny_long").roles
    layers = [model.decoder.layers[number] for number, role in enumerate(roles) if role is not None]
    assert [getattr(core(layer), "window", None) for layer in layers] == [WINDOW, None, None]
    assert core(model.mtp.layers[0].mtp_model_layer).window == WINDOW
    for layer in (*layers, model.mtp.layers[0].mtp_model_layer):
        rotary = layer.self_attention.rotary_pos_emb
        assert type(rotary).__name__ == "YarnRotaryEmbedding"
        assert {name: getattr(rotary, name.replace("rotary_", "")) for name in YARN} == YARN


@torch.no_grad()
def test_a_key_is_seen_as_far_as_the_window(alone: Any) -> None:
    tokens = micro_batch.draw_tokens(1, S)
    before = alone(tokens[:, :-1], torch.arange(S)[None], None)
    tokens[0, 10] += 1
    changed = (alone(tokens[:, :-1], torch.arange(S)[None], None) - before)[0].abs().amax(-1) > 1e-6
    assert changed.nonzero().flatten().tolist() == list(range(10, 10 + WINDOW + 1))


def test_decoding_in_pieces_sees_the_same_window(built: Any) -> None:
    tokens, model = micro_batch.draw_tokens(2, S - 1), built.eval()
    assert torch.allclose(in_pieces(model, tokens, [20, 1, 19, 8]), logits(model, tokens), atol=2e-4)
    model.train()


def test_a_window_as_long_as_the_row_is_full_attention(make: Make) -> None:
    outcomes = []
    for schedule, mtp in (("WFS", "W"), ("-FS", "-")):
        model = make(mla={"window_size": S}, dsa={"schedule": schedule}, mtp={"attention": mtp})
        outcomes.append(micro_batch.outcome(model, micro_batch.draw_tokens(2, S)))
    (losses, gradients), (expected, others) = outcomes
    torch.testing.assert_close(losses, expected)
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], rtol=1e-3, atol=1e-6, msg=name)


def test_the_rotary_embedding_is_yarns(alone: Any) -> None:
    """Frequencies by the paper's ramp (arXiv 2309.00071, section 3.2), from the model's own numbers; mscale, too."""
    attention, width = alone.decoder.layers[0].self_attention, 16
    table = rotation(attention.rotary_pos_emb, S)
    base, original, factor = 500_000.0, 16, 4.0

    def pair(rotations: float) -> float:
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(pair(4.0)), 0), min(math.ceil(pair(1.0)), width - 1)
    kept = [1 - min(max((i - low) / ((high - low) or 1e-3), 0), 1) for i in range(width // 2)]
    rates = [base ** (-2 * i / width) * (k + (1 - k) / factor) for i, k in enumerate(kept)]
    scale = (0.1 * math.log(factor) + 1) / (0.08 * math.log(factor) + 1)
    angles = torch.outer(torch.arange(S).double(), torch.tensor(rates, dtype=torch.float64))
    cosines = scale * angles.cos()
    exact = table.double()
    assert any((exact[..., i : i + width // 2] - cosines).abs().max() < 1e-5 for i in (0, width // 2)), exact.shape
    expected = (0.08 * math.log(factor) + 1) ** 2 / math.sqrt(32)
    assert attention.softmax_scale == pytest.approx(expected)
    assert core(alone.decoder.layers[0]).softmax_scale == pytest.approx(expected)


def test_recompute_and_documents(make: Make, built: Any) -> None:
    """Packed rows are each document by itself, whatever the window; what is recomputed changes nothing."""
    lengths = (5, 30, 13)
    tokens, documents = micro_batch.draw_tokens(1, S), {"packed_seq_params": micro_batch.packed(lengths)}
    row, expected = micro_batch.outcome(built, tokens, **documents)
    for words in (stock.full_recompute(), stock.selective_recompute("core_attn")):
        losses, gradients = micro_batch.outcome(make(*words), tokens, **documents)
        assert torch.equal(losses, row)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], msg=name)
    by_itself = micro_batch.losses_of(built, tokens[:, 5:36], packed_seq_params=micro_batch.packed((30,)))
    assert torch.allclose(row[:, 5:35], by_itself, atol=1e-4)


def test_advice_leaves_windows_as_they_are(make: Make) -> None:
    for schedule in ("WFS", "FW-"):
        schedules = Schedules(make(dsa={"schedule": schedule}))
        assert schedules.text(frozenset(schedules.full)) == schedule


def test_a_checkpoint_says_what_no_argument_does() -> None:
    long, short = (layout.recorded(preset(name)) for name in ("nam56r_tiny_long", "nam56r_tiny"))
    added = {"mtp.attention": "W", "mla.yarn.original_max_position_embeddings": 256}
    assert {name: long[name] for name in long.keys() - short.keys()} == added | {
        "mla.yarn.beta_fast": 32.0,
        "mla.yarn.beta_slow": 1.0,
    }
    config = type("Config", (), {layout.MODEL_KEY: long})()
    saved = {layout.KEY: layout.LAYOUT, layout.MODEL_KEY: short, layout.LOADED_FROM: "old"}
    with raises(CheckpointError, "old", "--finetune"):
        layout.mark_or_check(dict(saved), config)
    layout.mark_or_check(dict(saved) | {layout.MODEL_KEY: long}, config)
    other = layout.recorded(with_overrides(preset("nam56r_tiny_long"), {"mla": {"yarn": {"beta_fast": 16.0}}}))
    with raises(CheckpointError, "mla.yarn.beta_fast is 16.0", "32.0"):
        layout.mark_or_check(dict(saved) | {layout.MODEL_KEY: other}, config)
