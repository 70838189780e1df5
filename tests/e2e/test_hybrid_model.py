"""nam56r_tiny on HybridModel and on GPTModel: the same parameters, losses and gradients, and keys of checkpoints.

Shape legend: S sequence, B batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacpp_mcore.errors import ArgumentMismatchError, CheckpointError, ModelError
from megacpp_mcore.model import Layout, hybrid, preset, with_overrides
from megacpp_mcore.model.training import GPT, HYBRID
from tests import micro_batch, stock
from tests.distributed.comparing import assert_same_bytes, differing_tensors
from tests.distributed.runs import Laboratory, Run
from tests.errors import raises
from tests.layer_specs.test_decode import in_pieces, logits

ROOT = Path(__file__).parents[2]
S, B = 32, 2
TINY = preset("nam56r_tiny")
OVERRIDES: dict[str, Any] = {"seq_length": S, "dsa": {"topk": 8, "loss_coeff": 0.1}, "mtp": {"depth": 2}}
SMALL = with_overrides(TINY, OVERRIDES)


def build(process: Path, *extra: str, changed: Callable[[list[str]], None] = lambda _: None) -> Any:
    """The HybridModel that stock builds; ``changed`` may edit the command line."""
    return stock.build(OVERRIDES, TINY, process, *extra, model_class=HYBRID, changed=changed).train()


def build_gpt(process: Path) -> Any:
    return stock.build(OVERRIDES, TINY, process).train()


@pytest.fixture(scope="module")
def pair(process: Path) -> tuple[Any, Any]:
    """The model of each class, from one seed, nothing copied; tests leave them as they are, but for gradients."""
    return build_gpt(process), build(process)


def losses_and_gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    stock.loss_scale(1.0)
    return micro_batch.outcome(model, micro_batch.draw_tokens(B, S), attention_mask=micro_batch.causal_mask(S))


def test_both_hosts_build_the_same_parameters_from_one_seed(pair: tuple[Any, Any]) -> None:
    gpt, hybrid_ = (dict(model.named_parameters()) for model in pair)
    assert list(gpt) == list(hybrid_)  # in one order, too: the distributed optimizer's buffers go by it
    assert [name for name in gpt if not torch.equal(gpt[name], hybrid_[name])] == []
    buffers = [{name: value.shape for name, value in model.named_buffers()} for model in pair]
    assert buffers[0] == buffers[1]


def test_losses_and_gradients_are_the_same_bit_for_bit(pair: tuple[Any, Any]) -> None:
    (losses, gradients), (hybrid_losses, hybrid_gradients) = (losses_and_gradients(model) for model in pair)
    assert torch.equal(losses, hybrid_losses)
    assert gradients.keys() == hybrid_gradients.keys()
    assert len(gradients) == len(list(pair[0].parameters()))
    assert [name for name in gradients if not torch.equal(gradients[name], hybrid_gradients[name])] == []


def test_copies_of_the_configuration_for_each_layer_change_nothing(
    process: Path, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As HybridModel hands them to its stack since NVIDIA/Megatron-LM#6313: made before we set anything on the original."""
    from megatron.core.models.hybrid import hybrid_block, hybrid_layer_allocation, hybrid_model

    build_module = hybrid_model.build_module
    classes = {symbol: type(f"Of{symbol}", (), {}) for symbol in "+MEDG"}
    monkeypatch.setattr(hybrid_layer_allocation, "LAYER_SYMBOL_TO_CONFIG_CLASS", classes, raising=False)
    copies: list[Any] = []

    def build_stack(spec: Any, config: Any, *, layer_type_list: list[str], **more: Any) -> Any:
        copies[:] = [copy.deepcopy(config) for _ in layer_type_list]
        for own_config, symbol in zip(copies, layer_type_list, strict=True):
            own_config.__class__ = type("Own", (classes[symbol], type(config)), {})
        return build_module(spec, config, layer_config_list=copies, **more)

    def build_layer(spec: Any, *, layer_number: int, config: Any, **more: Any) -> Any:
        return build_module(spec, layer_number=layer_number, config=copies[layer_number - 1], **more)

    monkeypatch.setattr(hybrid_model, "build_module", build_stack)
    monkeypatch.setattr(hybrid_block, "build_module", build_layer)
    model = build(process)
    assert {id(layer.config) for layer in model.decoder.layers} == {id(model.config)}
    weights = dict(pair[0].named_parameters())
    assert [name for name, weight in model.named_parameters() if not torch.equal(weight, weights[name])] == []
    (losses, gradients), (copied_losses, copied_gradients) = losses_and_gradients(pair[0]), losses_and_gradients(model)
    assert torch.equal(losses, copied_losses)
    assert [name for name in gradients if not torch.equal(gradients[name], copied_gradients[name])] == []


def test_a_sequence_in_pieces_gives_what_it_gives_at_once(pair: tuple[Any, Any]) -> None:
    """With an inference context; with GPTModel: tests/layer_specs/test_decode.py."""
    tokens, model = micro_batch.draw_tokens(B, S - 1), pair[1].eval()
    at_once, pieces = logits(model, tokens), in_pieces(model, tokens, [20, 1, 11])
    model.train()
    assert torch.allclose(pieces, at_once, rtol=1e-4, atol=1e-5)


def test_full_recompute_changes_nothing(process: Path, pair: tuple[Any, Any]) -> None:
    """Except that the gradients of the two MTP depths are summed in another order."""
    losses, gradients = losses_and_gradients(pair[1])
    recomputed, recomputed_gradients = losses_and_gradients(build(process, *stock.full_recompute()))
    assert torch.equal(losses, recomputed)
    assert differing_tensors(gradients, recomputed_gradients, 2e-6) == []


def test_checkpoint_keys_and_shards_are_the_same_by_construction(pair: tuple[Any, Any]) -> None:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensorFactory

    def entries(model: Any) -> dict[str, Any]:
        shards = {}
        state = model.sharded_state_dict(metadata={"dp_cp_group": model.pg_collection.dp_cp})
        for place, value in state.items():
            for part in nested_values({place: value}):
                assert isinstance(part, ShardedBase)
                shape = None if isinstance(part, ShardedTensorFactory) else getattr(part, "global_shape", None)
                shards[place] = (type(part).__name__, part.key, shape, getattr(part, "replica_id", None))
        return shards

    gpt, hybrid_ = (entries(model) for model in pair)
    assert len(gpt) > len(list(pair[0].parameters())) // 2
    assert gpt == hybrid_


def test_both_hosts_mark_what_they_save_and_refuse_another_layout(pair: tuple[Any, Any]) -> None:
    for model in pair:
        groups = {"dp_cp_group": model.pg_collection.dp_cp}
        metadata = dict(groups)
        model.sharded_state_dict(metadata=metadata)
        full = [number for number, role in enumerate(SMALL.roles, 1) if role == "-"]
        decay = {"mamba3.decay_activation": "softplus", "mamba3.a_floor": 1e-4}
        marks = {"megacpp_layout": 2, "megacpp_model": {**decay, "layers of full attention": full}}
        assert metadata == {**groups, **marks, "megacpp_experts": "megacpp_mcore"}
        model.sharded_state_dict(metadata={**metadata, "megacpp_loaded_from": "/now"})
        other = {**metadata, "megacpp_model": {"mamba3.a_floor": 0.01}, "megacpp_loaded_from": "/other"}
        with raises(CheckpointError, "/other", "mamba3.a_floor is 0.01", "0.0001"):
            model.sharded_state_dict(metadata=other)
        with raises(CheckpointError, "/old", "megacpp_layout None", 2):
            model.sharded_state_dict(metadata={**groups, "megacpp_loaded_from": "/old"})
        # What --ckpt-format torch saves: here, and by mixers that had torch's own first version.
        state = model.state_dict()
        model.load_state_dict(state)
        mixers = [name for name, entry in state._metadata.items() if entry.get("version") == 2 and name]
        assert len(mixers) == sum(layer in "MR" for layer in SMALL.layers)
        state._metadata[mixers[0]]["version"] = 1
        with pytest.raises(CheckpointError, match=r"layout 1.* 2"):
            model.load_state_dict(state)


def put(flag: str, value: str) -> Callable[[list[str]], None]:
    def change(command: list[str]) -> None:
        command[command.index(flag) + 1] = value

    return change


@pytest.mark.parametrize(
    ("pattern", "error", "says"),
    [
        ("+EMEDEMEDEMM/+-/+-", ArgumentMismatchError, r"found '\+EMEDEMEDEMM/\+-/\+-', expected '\+EMEDEMEDEMG/"),
        ("+EMEDEMEDEM*/+-/+-", ValueError, "Attention and MLA/DSA in one model"),  # Megatron's own
        ("+EMEDEMEDEM-/+-/+-", ArgumentMismatchError, r"hybrid_layer_pattern.* '\+EMEDEMEDEM-/\+-/\+-'"),
        ("+EMEDEMEDEMG/D-/D-", ArgumentMismatchError, "hybrid_layer_pattern: found .*/D-/D-'"),
    ],
)
def test_patterns_of_other_models(process: Path, pattern: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        build(process, changed=put("--hybrid-layer-pattern", pattern))


def test_layers_built_by_hand_that_are_of_no_model_are_refused(process: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With neither a stock script's arguments nor a provider's fields; with a configuration for each layer instead of
    symbols, as newer Megatron gives it, that is of none; of another MTP block."""
    from megacpp_mcore.layer_specs.hybrid_model import NAM56RStack, SharedMTPLayer, hybrid_layer_allocation

    config = stock.model_config(stock.words(SMALL)).transformer
    with raises(ArgumentMismatchError, "hybrid_layer_pattern", None):
        NAM56RStack(config, None, list("+EM"), pg_collection=None)
    classes = {"M": type("MambaConfig", (), {})}
    monkeypatch.setattr(hybrid_layer_allocation, "LAYER_SYMBOL_TO_CONFIG_CLASS", classes, raising=False)
    with raises(ModelError, type(config).__name__, "MambaConfig"):
        NAM56RStack(config, None, layer_config_list=[config], pg_collection=None)
    with pytest.raises(ModelError, match=r"'D-'.*'\+-'"):
        SharedMTPLayer(config, mtp_layer_pattern="D-")


def test_either_spec_builds_both_hosts(process: Path, pair: tuple[Any, Any]) -> None:
    """By the scripts' own builders, from the two words of ``--spec``: the other ones than those that lowering gives to both."""
    for built, model_class in zip(pair, (GPT, HYBRID), strict=True):
        other = put("megacpp_mcore", "nam56r_tiny_hybrid")
        model = stock.build(OVERRIDES, TINY, process, model_class=model_class, changed=other)
        assert type(model) is type(built)
        assert list(dict(model.named_parameters())) == list(dict(built.named_parameters()))


def assert_both_train_the_same(laboratory: Laboratory, layout: Layout, script: Path | None = None) -> Run:
    """Losses, gradient norms and checkpoints of both model classes, bit for bit; the run of HybridModel, by ``script``."""
    gpt = laboratory.run(GPT, layout, 2, ("--lr-warmup-iters", "1"), model_class=GPT)
    laboratory.script = script
    run = laboratory.run(HYBRID, layout, 2, ("--lr-warmup-iters", "1"), model_class=HYBRID)
    assert {"lm loss", "mtp_1 loss", "indexer loss", "grad norm"} <= gpt.scalars.keys()
    assert run.scalars == gpt.scalars
    assert_same_bytes(gpt.tensors(2), run.tensors(2))
    return run


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.checkout
def test_the_stock_script_trains_what_gpt_model_trains(megatron_lm: Path, tmp_path: Path) -> None:
    """``pretrain_hybrid.py`` as it is, from the same seed."""
    laboratory = Laboratory(tmp_path, overrides={})
    run = assert_both_train_the_same(laboratory, Layout(), megatron_lm / "pretrain_hybrid.py")
    assert "building nam56r_tiny on HybridModel, pattern +EMEDEMEDEMG/+-" in run.output


@pytest.mark.slow
@pytest.mark.exhaustive
def test_in_virtual_pipeline_stages_both_hosts_train_the_same(tmp_path: Path) -> None:
    """Two processes with two stages each, marked by '|' in HybridModel's pattern and by an argument for GPTModel."""
    laboratory = Laboratory(tmp_path, overrides={"dsa": {"schedule": "-FF"}})  # legal in four stages
    assert_both_train_the_same(laboratory, Layout(pipeline=2, virtual=2))


def saved(model_class: str, **changes: Any) -> SimpleNamespace:
    """Return the relevant arguments of a nam56r_tiny checkpoint."""
    common = {"num_layers": 12, "mtp_num_layers": 1}
    placed = [int(letter == "E") for letter in TINY.layers]
    own: dict[str, dict[str, Any]] = {
        GPT: {"spec": ["megacpp_mcore", "nam56r"], "moe_layer_freq": placed, "hybrid_layer_pattern": None},
        HYBRID: {
            "spec": ["megacpp_mcore", "nam56r_hybrid"],
            "moe_layer_freq": 1,
            "hybrid_layer_pattern": hybrid.plan(TINY).text,
        },
    }
    return SimpleNamespace(**(common | own[model_class] | changes))


@pytest.fixture(scope="module")
def decide() -> Callable[..., Any]:
    """The replacement, around a stub of stock's function that shows that it was called."""
    from megacpp_mcore.patches.checkpoint_hosts import PATCH

    return PATCH.edits[0].make(lambda args, ckpt_args, model: "stock's")


def test_either_way_nothing_is_translated(decide: Callable[..., Any]) -> None:
    assert decide(saved(GPT), saved(HYBRID), []) == (None, False)
    assert decide(saved(HYBRID), saved(GPT), []) == (None, False)
    staged = saved(HYBRID, hybrid_layer_pattern="+EMEDE|MEDEMG/+-")
    assert decide(staged, saved(GPT), []) == decide(saved(GPT), staged, []) == (None, False)


@pytest.mark.parametrize("spec", [None, [], ["local"], ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]])
def test_other_models_are_stocks_affair(decide: Callable[..., Any], spec: list[str] | None) -> None:
    for model_class, other in ((GPT, HYBRID), (HYBRID, GPT)):
        assert decide(saved(model_class), saved(other, spec=spec), []) == "stock's"
        assert decide(saved(model_class, spec=spec), saved(other), []) == "stock's"
        assert decide(saved(model_class), saved(model_class), []) == "stock's"
    assert decide(saved(GPT), SimpleNamespace(), []) == "stock's"


@pytest.mark.parametrize(
    "changes", [{"mtp_num_layers": 2}, {"num_layers": 13}, {"moe_layer_freq": 1}, {"moe_layer_freq": [1] + [0] * 11}]
)
def test_a_checkpoint_of_another_model_is_refused(decide: Callable[..., Any], changes: dict[str, Any]) -> None:
    with raises(ModelError, "checkpoint (gpt)", "run (hybrid)", code="another-model"):
        decide(saved(HYBRID), saved(GPT, **changes), [])
    with raises(ModelError, "checkpoint (hybrid)", "run (gpt)", code="another-model"):
        decide(saved(GPT, **changes), saved(HYBRID), [])
    if "mtp_num_layers" in changes:  # the shared block's depths may change
        assert decide(saved(GPT), saved(GPT, **changes), []) == "stock's"
    else:
        with raises(ModelError, "checkpoint (gpt)", "run (gpt)", code="another-model"):
            decide(saved(GPT), saved(GPT, **changes), [])


def test_what_decides_no_shape_makes_another_model_too_unless_a_run_begins_with_its_weights(
    decide: Callable[..., Any],
) -> None:
    ours, theirs = {"rotary_base": 500000, "moe_router_topk": 2}, {"rotary_base": 10000, "moe_router_topk": 2}
    for other in (GPT, HYBRID):
        with raises(ModelError, "rotary_base 10000", 500000, "--finetune", code="another-model"):
            decide(saved(GPT, **ours), saved(other, **theirs), [])
    assert decide(saved(HYBRID, **ours), saved(GPT, **theirs | ours), []) == (None, False)
    assert decide(saved(HYBRID, **ours, finetune=True), saved(GPT, **theirs), []) == (None, False)


def test_every_field_of_another_model_is_named(decide: Callable[..., Any]) -> None:
    other = saved(GPT, num_layers=13, hidden_size=64, vocab_size=300)
    with raises(ModelError, "layers 13", 12, "vocab_size 300", "hidden_size 64", code="another-model"):
        decide(saved(GPT, vocab_size=512), other, [])


def test_a_vocabulary_that_only_the_tokenizer_has_is_compared_by_shapes(decide: Callable[..., Any]) -> None:
    """As of an imported checkpoint, which has its size in an argument, in a run with a tokenizer of Hugging Face."""
    unsaid, known = saved(HYBRID, vocab_size=None), saved(GPT, vocab_size=512)
    assert decide(unsaid, known, []) == decide(known, unsaid, []) == (None, False)
