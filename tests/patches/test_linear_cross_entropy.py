"""The patch linear-cross-entropy on stock GPTModel and HybridModel: losses and all gradients are stock's, no logits are made.

Every comparison is of one model with itself: stock first, then patched. Legend: B batch, S sequence, H width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megacpp_mcore import patches
from megacpp_mcore.errors import ModelError, PatchError
from megacpp_mcore.model import preset
from megacpp_mcore.ops.linear_cross_entropy import chunked
from megacpp_mcore.patches import linear_cross_entropy
from megacpp_mcore.patches.linear_cross_entropy import PATCH, LazyLogits
from tests import micro_batch, stock
from tests.distributed.comparing import differing_tensors
from tests.dsa_layer import Recorder, elements
from tests.errors import raises

B, S, H, V = 2, 32, 32, 384
TOLERANCE = 2e-6
"""Relative, of the norm of a tensor in fp32."""

Outcome = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of the tokens, which divide nothing."""
    for name, size in SMALL.items():
        monkeypatch.setattr(chunked, name, size)
    linear_cross_entropy._warn.cache_clear()


SMALL = {"LOGIT_BYTES": {"cpu": 1}, "TOKENS": 9}


patched = functools.partial(stock.patched, PATCH)


def config_of(**settings: Any) -> Any:
    stock.restart_random()
    torch.manual_seed(1)
    return stock.small_config(**{"hidden_size": H, "mtp_num_layers": 2, "init_method_std": 0.3, **settings})


@contextlib.contextmanager
def norms_that_take_sequence_parallelism() -> Iterator[None]:
    """Stock's local norm refuses it, and HybridModel's final norm is Transformer Engine's."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from megacpp_mcore.layer_specs.parts import TorchNorm

    def norm(_: type, config: Any, hidden_size: int, eps: float = 1e-5, **__: Any) -> Any:
        return TorchNorm(config, hidden_size, eps)

    with mock.patch.object(WrappedTorchNorm, "__new__", norm), mock.patch.object(hybrid_block, "TENorm", TorchNorm):
        yield


def gpt(tied: bool = False, **settings: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    config, spec = config_of(**settings), get_gpt_layer_local_spec()
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
    words = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": tied, "mtp_block_spec": mtp}
    with norms_that_take_sequence_parallelism():
        return GPTModel(config, spec, vocab_size=V, max_sequence_length=S, **words)


def hybrid(tied: bool = False, **settings: Any) -> Any:
    """The real HybridModel with stock's local modules, which its own spec takes from Transformer Engine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
    from megatron.core.transformer.spec_utils import ModuleSpec

    config, spec = config_of(num_layers=2, **settings), get_gpt_layer_local_spec()
    depths = config.mtp_num_layers or 0
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if depths else None
    block = ModuleSpec(module=MultiTokenPredictionBlock, submodules=mtp)
    stack = stock.hybrid_stack(spec.submodules, "attention_layer", mtp_block_spec=block)
    words = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": tied}
    pattern = "/".join(["*-"] * (1 + depths))
    with norms_that_take_sequence_parallelism():
        return HybridModel(config, stack, V, S, hybrid_layer_pattern=pattern, **words)


def forward(model: Any, **options: Any) -> torch.Tensor:
    """Losses of fixed tokens, [B, S]; with ``labels=None`` logits."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, V, (B, S + 1), generator=generator)
    mask = (torch.rand(B, S, generator=generator) < 0.9).float()
    options = {"attention_mask": micro_batch.causal_mask(S), "loss_mask": mask, **options}
    return micro_batch.losses_of(model, tokens, **options)


def outcome(model: Any, **options: Any) -> Outcome:
    """Losses, what MTP logs, its guesses, and every gradient, for unequal weights of the tokens."""
    from megatron.core.transformer import multi_token_prediction as mtp

    guesses: list[torch.Tensor] = []
    count = mtp._compute_mtp_acceptance_counts

    def spy(logits: Any, *args: Any) -> Any:
        guesses.append(torch.argmax(logits, dim=-1))
        return count(logits, *args)

    mtp.MTPLossLoggingHelper.tracker.clear()
    model.zero_grad(set_to_none=True)
    with mock.patch.object(mtp, "_compute_mtp_acceptance_counts", spy):
        losses = forward(model, **options)
    micro_batch.backward((losses * torch.randn(B, S, generator=torch.Generator().manual_seed(5))).sum())
    tensors = {"losses": losses.detach()} | {f"guess {k}": guess.double() for k, guess in enumerate(guesses)}
    if guesses:
        tracker = mtp.MTPLossLoggingHelper.tracker
        tensors |= {key: tracker[key].clone() for key in ("loss_values", "correct_values", "total_values")}
    return tensors | micro_batch.gradients(model)


@contextlib.contextmanager
def counted_losses(masks: list[torch.Tensor | None] | None = None) -> Iterator[list[torch.Tensor]]:
    """The losses that came from lazy logits, and in ``masks`` the loss mask that each was handed."""
    made: list[torch.Tensor] = []
    original = LazyLogits.losses

    def losses(self: LazyLogits, labels: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        made.append(original(self, labels, mask))
        if masks is not None:
            masks.append(mask)
        return made[-1]

    with mock.patch.object(LazyLogits, "losses", losses):
        yield made


VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "no MTP": {"mtp_num_layers": None},
    "per-token loss": {"calculate_per_token_loss": True},
    "detached heads": {"mtp_detach_heads": True},
    "muP": {"use_mup": True, "mup_base_hidden_size": H // 2, "mup_output_mult": 0.5},
    "fused cross-entropy": {"cross_entropy_loss_fusion": True},
}


def check_same(model: Any, heads: int, **options: Any) -> None:
    """Compare losses and gradients of the patched model with stock's."""
    fused = model.config.cross_entropy_loss_fusion
    model.config.cross_entropy_loss_fusion = False  # stock's fused one rounds its gradient to bfloat16 in any model
    expected = outcome(model, **options)
    model.config.cross_entropy_loss_fusion = fused
    with patched(), counted_losses() as made:
        actual = outcome(model, **options)
    assert len(made) == heads
    assert (actual["losses"].shape, actual["losses"].dtype) == ((B, S), torch.float32)
    assert actual["losses"].is_contiguous()
    assert differing_tensors(expected, actual, TOLERANCE) == []
    assert [name for name, param in model.named_parameters() if param.requires_grad and name not in actual] == []


@pytest.mark.parametrize("build", [gpt, hybrid])
@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_and_all_gradients(process: Path, build: Callable[..., Any], variant: str) -> None:
    model = build(**VARIANTS[variant])
    check_same(model, 1 + (model.config.mtp_num_layers or 0))


@pytest.mark.exhaustive
def test_evaluation_and_frozen_heads(process: Path) -> None:
    model = gpt()
    with torch.no_grad():
        plain = forward(model.eval())
        with patched(), counted_losses() as made:
            actual = forward(model)
    assert len(made) == 3
    assert not actual.requires_grad
    assert differing_tensors({"losses": plain}, {"losses": actual}, TOLERANCE) == []
    model.output_layer.weight.requires_grad_(False)
    check_same(model.train(), 3)


@pytest.mark.exhaustive
def test_bias_and_labels_that_no_rank_holds(process: Path) -> None:
    """Stock ignores no label: one outside of the vocabulary costs log-sum-exp less the largest logit."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    model = gpt(mtp_num_layers=None)
    model.output_layer = ColumnParallelLinear(
        H, V, config=model.config, init_method=model.config.init_method, bias=True, tp_group=model.tp_group
    )
    with torch.no_grad():
        model.output_layer.bias.normal_()
    labels = torch.full((B, S), -100)
    labels[:, ::3], labels[:, 1::3] = V + 5, 7
    check_same(model, 1, labels=labels)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_composes_with_mtp_shared_block(process: Path, first: str) -> None:
    """Decayed weights of the depths scale the gradient of what compute_language_model_loss returns, logits or not."""
    overrides = {"seq_length": S, "dsa": {"topk": 8}, "mtp": {"depth": 2}}
    model = stock.build(overrides, preset("nam56r_tiny"), process).train()
    stock.loss_scale(1.0)
    assert model.config.mtp_loss_decay == 0.6
    expected = outcome(model)
    patches.revert(["mtp-shared-block"])
    plain = outcome(model)
    with contextlib.ExitStack() as stack:
        if first == "ours":
            stack.enter_context(patched())
        patches.apply(["mtp-shared-block"])
        if first == "theirs":
            stack.enter_context(patched())
        made = stack.enter_context(counted_losses())
        actual = outcome(model)
    assert len(made) == 3
    assert differing_tensors(expected, actual, 2e-5) == []
    assert differing_tensors(plain, actual, 1e-3) != []


@pytest.mark.exhaustive
@pytest.mark.parametrize("build", [gpt, hybrid])
@pytest.mark.parametrize("script", [False, True])
def test_the_op_is_handed_the_mask_that_its_losses_are_multiplied_by(
    process: Path, build: Callable[..., Any], script: bool
) -> None:
    """That of an MTP depth is rolled; that of the main head is sure where a stock script's loss function multiplies by it."""
    masks: list[torch.Tensor | None] = []
    mask = (torch.rand(B, S, generator=torch.Generator().manual_seed(4)) < 0.9).float()
    stock_script = mock.patch("megatron.training.global_vars._GLOBAL_ARGS", SimpleNamespace() if script else None)
    with stock_script, patched(), counted_losses(masks):
        forward(build(), loss_mask=mask)
    *depths, of_main = masks
    for depth, depth_mask in enumerate(depths, start=1):
        assert torch.equal(depth_mask, torch.cat((mask[:, depth:], torch.zeros(B, depth)), dim=1).t())
    assert len(depths) == 2
    assert torch.equal(of_main, mask.t()) if script else of_main is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("build", [gpt, hybrid])
def test_without_a_mask_the_depths_have_that_of_mtp(process: Path, build: Callable[..., Any]) -> None:
    """Bridge's forward step passes none."""
    model, masks = build(), list[torch.Tensor | None]()
    expected = outcome(model, loss_mask=None)
    with patched(), counted_losses(masks):
        actual = outcome(model, loss_mask=None)
    *depths, of_main = masks
    assert [mask is not None and mask.sum().item() for mask in depths] == [B * (S - 1), B * (S - 2)]
    assert of_main is None
    assert differing_tensors(expected, actual, 2e-5) == []


TWO_RANKS: tuple[Mapping[str, Any], ...] = (
    {},
    {"sequence_parallel": True},
    {"sequence_parallel": True, "tied": True},
    {"sequence_parallel": True, "mtp_detach_heads": True},
)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    stock.on_ranks("tests.patches.test_linear_cross_entropy", 2, tmp_path)


def main(folder: Path) -> None:
    """Be one of two tensor-parallel ranks: losses and gradients are stock's in the same layout."""
    for name, size in SMALL.items():
        setattr(chunked, name, size)
    with stock.one_process(folder / "store", tensor_model_parallel_size=2):
        for settings, build in itertools.product(TWO_RANKS, (gpt, hybrid)):
            check_same(build(tensor_model_parallel_size=2, **settings), heads=3)
        for build in (gpt, hybrid):
            model = build(tensor_model_parallel_size=2)
            expected = outcome(model)
            model.output_layer.gather_output = True
            off = forward(model) - expected["losses"]  # stock counts each logit once a rank
            assert torch.allclose(off, torch.full_like(off, math.log(2)), rtol=1e-5)
            for hook in (None, lambda *_: None):  # with hooks stock runs
                if hook is not None:
                    model.output_layer.register_forward_hook(hook)
                for gather in (None, True):
                    with patched():
                        actual = outcome(model, runtime_gather_output=gather)
                    assert differing_tensors(expected, actual, TOLERANCE) == []
        torch.distributed.barrier()


@pytest.mark.exhaustive
@pytest.mark.parametrize("build", [gpt, hybrid])
def test_no_tensor_of_tokens_times_vocabulary(process: Path, build: Callable[..., Any]) -> None:
    model = build()
    before, after = Recorder(), Recorder()
    with before:
        outcome(model)
    with patched(), after:
        outcome(model)
    assert elements(before.largest) == B * S * V
    assert elements(after.largest) == V * H


@pytest.mark.exhaustive
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("flagged", [False, True])
def test_main_grad(process: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, flagged: bool) -> None:
    """Fused accumulation: the sum of main head and depths is added, flag and placeholder are what the hooks expect."""
    from megatron.core.tensor_parallel import layers

    def accumulate(inputs: torch.Tensor, gradient: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.add_(gradient.t() @ inputs)

    extension = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", extension, raising=False)
    model = gpt(tied=tied)
    weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    model.output_layer.gradient_accumulation_fusion = True
    results = []
    for scope in (contextlib.nullcontext, patched):
        weight.main_grad = torch.ones(V, H)
        if flagged:
            weight.grad_added_to_main_grad = False
        with scope(), counted_losses() as made:
            results.append({**outcome(model), "main_grad": weight.main_grad})
        assert getattr(weight, "grad_added_to_main_grad", None) is (True if flagged else None)
    name = "embedding.word_embeddings.weight" if tied else "output_layer.weight"
    # The placeholder is uninitialised unless the embedding adds to it.
    of_stock, ours = (result.pop(name, None) for result in results)
    assert len(made) == 3
    assert differing_tensors(*results, TOLERANCE) == []
    assert float((results[1]["main_grad"] - 1).norm()) > 0.1
    if tied:
        assert differing_tensors({name: of_stock}, {name: ours}, TOLERANCE) == []
        assert torch.count_nonzero(ours) > 0
    elif flagged:
        assert ours.shape == of_stock.shape == (V, H)
    else:
        assert ours is of_stock is None


def of_layer(**settings: Any) -> Callable[[Any, Any], Any]:
    return lambda _, layer: [setattr(layer, name, value) for name, value in settings.items()]


def own_loss(model: Any, _: Any) -> None:
    original = model.compute_language_model_loss
    model.compute_language_model_loss = MethodType(lambda _, labels, logits: original(labels, logits), model)


def other_weight(_: Any, layer: Any) -> None:
    layer._parameters["weight"] = type("ShardedTensor", (torch.nn.Parameter,), {})(layer.weight.detach())


def deferred(model: Any, layer: Any) -> None:
    config = copy.copy(model.config)  # the other layers have theirs from the model's
    config.defer_embedding_wgrad_compute, config.wgrad_deferral_limit = True, 0
    of_layer(config=config, embedding_activation_buffer=[], grad_output_buffer=[])(model, layer)


OBSTACLES: Mapping[str, Callable[[Any, Any], Any]] = {
    "has its own compute_language_model_loss": own_loss,
    "has its own _scale_logits": lambda model, _: setattr(model, "_scale_logits", lambda logits: logits * 1.0),
    "is a QuantizedLinear, not a plain": lambda _, layer: setattr(
        layer, "__class__", type("QuantizedLinear", (type(layer),), {})
    ),
    "is a ColumnParallelLinear, not a plain": lambda _, layer: setattr(
        layer, "forward", functools.partial(type(layer).forward, layer)
    ),
    "has hooks": lambda _, layer: layer.register_forward_hook(lambda *_: None),
    "has hooks, which get its logits or": lambda _, layer: layer.register_full_backward_hook(lambda *_: None),
    "has hooks, which get": lambda _, layer: layer.register_full_backward_pre_hook(lambda *_: None),
    "defer_embedding_wgrad_compute keeps": deferred,
    "does not reduce the gradient": of_layer(disable_grad_reduce=True),
    "does not reduce": of_layer(explicit_expert_comm=True),
    "computes torch.float32 logits": of_layer(output_dtype=torch.float32),
    "does not add its bias": of_layer(skip_bias_add=True, bias=torch.nn.Parameter(torch.zeros(V))),
    "the output weight is a ShardedTensor": other_weight,
    "Megatron-FSDP owns": lambda _, layer: setattr(layer.weight, "__fsdp_param__", True),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("reason", OBSTACLES)
def test_stock_stays_where_logits_are_needed(process: Path, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    model = gpt()
    OBSTACLES[reason](model, model.output_layer)
    expected = forward(model)
    with patched(), counted_losses() as made, caplog.at_level(logging.WARNING, logger=linear_cross_entropy.__name__):
        actual = [forward(model), forward(model)]
    assert made == []
    assert all(torch.equal(losses, expected) for losses in actual)
    (line,) = [record.getMessage() for record in caplog.records if "linear-cross-entropy" in record.getMessage()]
    assert line.startswith("linear-cross-entropy: GPTModel keeps its logits: ")
    assert reason in line


def test_stock_stays_for_callers_who_need_logits(process: Path, tmp_path: Path) -> None:
    from megatron.core.inference.utils import InferenceMode

    model = gpt()
    logits = forward(model, labels=None)
    assert logits.shape == (B, S, V)
    losses = forward(model)
    with patched(), counted_losses() as made:
        assert torch.equal(forward(model, labels=None), logits)
        seen = forward(model, output_processor=lambda **kwargs: kwargs["output_layer"](kwargs["hidden_states"])[0])
        assert torch.equal(seen.transpose(0, 1), logits)
        InferenceMode.set_active()
        try:
            assert torch.equal(forward(model, labels=None, runtime_gather_output=True), logits)
            assert torch.equal(forward(model, runtime_gather_output=True), losses)
        finally:
            InferenceMode.unset_active()
        with torch.autocast("cpu", torch.bfloat16):
            assert forward(model).shape == (B, S)
        model.config.config_logger_dir = str(tmp_path)
        assert torch.equal(forward(model), losses)
        model.config.config_logger_dir = ""
        model.config.cross_entropy_loss_fusion, model.config.cross_entropy_fusion_impl = True, "te"
        with pytest.raises(RuntimeError, match="TE block"):
            forward(model)
        assert made == []
        model.config.cross_entropy_loss_fusion = False
        forward(model)
        assert len(made) == 3


@pytest.mark.exhaustive
def test_other_layers_and_other_models_are_stock(process: Path) -> None:
    """A failure leaves no trace: outside of a model's own forward its output layer returns logits again."""
    model = gpt()
    hidden = torch.randn(S, B, H)
    expected = model.output_layer(hidden)[0]
    with patched():
        with raises(ModelError, (S + 1, B), "token"):
            forward(model, labels=torch.zeros(B, S + 1, dtype=torch.int64), loss_mask=torch.ones(B, S + 1))
        assert torch.equal(model.output_layer(hidden)[0], expected)
        assert torch.equal(model.output_layer(hidden, weight=model.output_layer.weight)[0], expected)
        model.post_process = False
        assert forward(model).shape[0] == 3 * S  # hidden states of the trunk and both depths


@pytest.mark.exhaustive
def test_lazy_logits_refuse_what_nobody_foresaw(process: Path) -> None:
    layer = gpt(mtp_num_layers=None).output_layer
    lazy = LazyLogits(layer, torch.randn(S, B, H), layer.weight)
    for use in (
        lambda: torch.softmax(lazy, dim=-1), lambda: torch.argmax(lazy), lambda: torch.argmax(lazy, dim=0),
        lambda: lazy.max(dim=-1), lambda: lazy.max(dim=0), lambda: lazy * torch.ones(V),
    ):  # fmt: skip
        with raises(PatchError, "linear-cross-entropy"):
            use()
