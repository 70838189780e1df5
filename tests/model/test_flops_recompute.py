"""What recompute repeats, against torch's counter (which sees dense pairs) on models that stock Megatron built."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megacpp_mcore.errors import ModelError
from megacpp_mcore.model import Layout, flops, preset, with_overrides
from megacpp_mcore.model.flops import Families, Work
from megacpp_mcore.model.flops.recompute import Recomputation, recomputed
from megacpp_mcore.model.training import Recompute
from tests import stock
from tests.errors import raises
from tests.lanes import exhaustive_but
from tests.micro_batch import causal_mask, draw_tokens, losses_of
from tests.model.test_flops import BATCH, OVERRIDES, SMALL, counter

STEP = flops.step(SMALL, BATCH)


class _NoModules:
    """Replaces the counter's per-module bookkeeping, whose hooks fail on a checkpointed module of views."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., int]]:
    """torch's count of a training step of the model built with these words and this recompute of ours."""
    folder = tmp_path_factory.mktemp("recompute")
    tokens = draw_tokens(BATCH, SMALL.seq_length)

    @functools.cache
    def count(words: tuple[str, ...] = (), own: tuple[str, ...] = ()) -> int:
        model = stock.build(OVERRIDES, preset("nam56r_tiny"), folder, *words, recompute=list(own)).train()
        stock.loss_scale(1.0)
        mode = counter()
        mode.mod_tracker = _NoModules()  # type: ignore[assignment]
        with mode:
            losses_of(model, tokens, attention_mask=causal_mask(SMALL.seq_length)).mean().backward()
        return int(mode.get_total_flops())

    with stock.one_process(folder / "store"):
        yield count


CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "full": (stock.full_recompute(), ()),
    "block": (stock.full_recompute("block", 5), ()),
    "core_attn and mlp": (stock.selective_recompute("core_attn", "mlp"), ()),
    "nested": (stock.selective_recompute("moe", "shared_experts"), ()),
    "a, m and r": ((), ("a", "m", "r")),
    "full, and mtp again": (stock.full_recompute(), ("mtp",)),
    "mtp": ((), ("mtp",)),
    "experts beside stock's": (stock.selective_recompute("shared_experts", "mla_up_proj"), ("experts",)),
}


@pytest.mark.parametrize("case", exhaustive_but(CASES, "full, and mtp again", "a, m and r", "core_attn and mlp"))
def test_what_the_real_model_repeats(case: str, measure: Callable[..., int]) -> None:
    """On top of the count: masked pairs of the repeated cores, and 4 rows of zeros in the input projections of M and R."""
    words, own = CASES[case]
    arguments = stock.parse(stock.words(SMALL, *words))
    how = Recomputation.of_run(arguments, Recompute(**dict.fromkeys(own, True)))
    again = recomputed(SMALL, STEP, how)
    assert again.total.backward == 0 < again.total.forward
    sequence, topk = SMALL.seq_length, SMALL.dsa.topk
    hidden = BATCH * (sequence**2 - flops.causal_pairs(sequence))
    full = flops.full_core(hidden, SMALL.heads, SMALL.mla).forward
    unfilled = BATCH * (sequence * topk - flops.selected_pairs(sequence, topk))
    sparse = flops.sparse_core(unfilled, SMALL.heads, SMALL.mla).forward
    expected = again.total.forward + sum(full for part in again.mtp if part.attention_core.forward)
    for part, role, letter in zip(again.layers, SMALL.roles, SMALL.layers, strict=True):
        if part.attention_core.forward:
            expected += full if role == "-" else sparse
        if part != Families() and letter in "MR":
            expected += flops.product(STEP.tokens * 4 * SMALL.hidden_size).forward
    assert measure(words, own) - measure() == expected


def test_a_run_without_recompute_repeats_nothing() -> None:
    how = Recomputation.of_run(stock.parse(stock.words(SMALL)))
    assert (how, str(how)) == (Recomputation(), "none")
    again = recomputed(SMALL, STEP, how)
    assert again.total == Work()
    assert (len(again.layers), len(again.mtp)) == (SMALL.depth, 2)


def test_block_counts_from_the_start_of_each_stage() -> None:
    how = Recomputation(granularity="full", method="block", num_layers=2)
    again = recomputed(SMALL, STEP, how, SMALL.chunks(Layout(pipeline=3)))
    repeated = {number for number, part in enumerate(again.layers, start=1) if part != Families()}
    assert repeated == {1, 2, 5, 6, 9, 10}
    assert all(part == Families() for part in again.mtp)
    assert [part for part in recomputed(SMALL, STEP, how).layers if part != Families()] == list(again.layers[:2])


def test_full_recompute_is_the_forward_pass_but_for_the_heads() -> None:
    how = Recomputation(granularity="full", method="uniform", num_layers=1)
    again = recomputed(SMALL, STEP, how)
    for field in dataclasses.fields(Families):
        ours, repeated = getattr(STEP.families, field.name), getattr(again.families, field.name)
        if field.name == "indexer":  # which does not select a second time
            assert repeated == Work(flops.indexer_projections(SMALL, STEP.tokens)) != Work(ours.forward)
        else:
            assert repeated == (Work() if field.name == "head" else Work(ours.forward)), field.name


def test_an_indexer_that_is_not_trained_repeats_nothing() -> None:
    model = with_overrides(SMALL, {"dsa": {"loss_coeff": 0.0}})
    again = recomputed(model, flops.step(model, BATCH), Recomputation(granularity="full", method="uniform", num_layers=1))
    assert again.families.indexer == Work()


def test_element_wise_modules_repeat_no_product() -> None:
    how = Recomputation(granularity="selective", modules=("moe_act", "layernorm"))
    assert recomputed(SMALL, STEP, how).total == Work()


BLOCK: dict[str, Any] = {"granularity": "full", "method": "block", "num_layers": 1}
CORE: dict[str, Any] = {"granularity": "selective", "modules": ("core_attn",)}


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        ({"granularity": "some"}, ["granularity is 'some'"]),
        ({"granularity": "full", "num_layers": 1}, ["is None", "uniform or block"]),
        ({"granularity": "full", "method": "block"}, ["None layers"]),
        ({"granularity": "full", "method": "block", "num_layers": 0}, ["0 layers"]),
        (BLOCK | {"own": Recompute(m=True)}, ["for m", "--recompute-granularity full"]),
        ({"granularity": "selective", "modules": ("gdn_norm_out",)}, ["gdn_norm_out", "core_attn"]),
        (CORE | {"own": Recompute(a=True)}, ["for a", "--recompute-modules core_attn"]),
    ],
)
def test_settings_that_no_run_can_have(settings: dict[str, Any], values: list[str]) -> None:
    with raises(ModelError, *values):
        Recomputation(**settings)


def test_units_of_several_layers_do_not_go_with_mtp() -> None:
    how = Recomputation(granularity="full", method="uniform", num_layers=4)
    with raises(ModelError, "units of 4", 1):
        recomputed(SMALL, STEP, how)
    plain = with_overrides(SMALL, {"mtp": {"depth": 0}})
    step = flops.step(plain, BATCH)
    selection = step.families.indexer.forward - flops.indexer_projections(plain, step.tokens)
    assert recomputed(plain, step, how).total.forward == step.total.forward - step.head.head.forward - selection
