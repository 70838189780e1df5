"""What several ranks make of one model: stock's figure, that of our patches, and that of one rank.

Of tensor-parallel-sums, masked-losses, own-groups, mtp-shared-block by token, and linear-cross-entropy of gathered logits.
Legend: S sequence, B batch, H width, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megacpp_mcore.patches import (
    linear_cross_entropy,
    masked_losses,
    mtp_shared_block,
    own_groups,
    tensor_parallel_sums,
)
from tests import stock

pytestmark = pytest.mark.slow

S, B, H, V, RANKS = 3, 2, 32, 8, 2
CASES = ("sinks", "sinks of MLA", "output norm", "label smoothing", "gathered logits", "padding mask")
OF_ROWS, OF_REPLICAS = ("masked loss", "MTP in rows"), ("MTP by token", "mask of own group", "projections of own group")
PATCHES = tuple(
    module.PATCH for module in (tensor_parallel_sums, masked_losses, own_groups, linear_cross_entropy, mtp_shared_block)
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[float]]]:
    """By case and arm: stock, patched, right."""
    figures: dict[str, dict[str, list[float]]]
    figures, _ = stock.on_ranks("tests.distributed.test_tensor_parallel_sums", RANKS, tmp_path_factory.mktemp("sums"))
    return figures


@pytest.mark.parametrize("case", [*CASES, *OF_ROWS, *OF_REPLICAS])
def test_several_ranks_are_as_one(found: dict[str, dict[str, list[float]]], case: str) -> None:
    arms = found[case]
    assert arms["patched"] == pytest.approx(arms["right"], rel=1e-5, abs=1e-6)
    assert max(abs(one / right - 1) for one, right in zip(arms["stock"], arms["right"], strict=True)) > 0.05


def test_the_figures_of_stock(found: dict[str, dict[str, list[float]]]) -> None:
    """Sinks' gradients of norm 3 and 4; a loss that is larger by the logarithm of the ranks."""
    assert (found["sinks"]["stock"], found["sinks"]["right"]) == ([3.0], [5.0])
    loss, right = (found["gathered logits"][arm][0] for arm in ("stock", "right"))
    assert loss - right == pytest.approx(0.6931, abs=1e-3)
    doubled = [2 * one for one in found["padding mask"]["right"]]
    assert found["padding mask"]["stock"] == pytest.approx(doubled, rel=1e-5)
    assert (found["masked loss"]["stock"], found["masked loss"]["right"]) == ([4.5, 4.5], [3.25, 3.25])


def test_a_group_over_which_sequences_would_not_be_cut_is_refused(process: Path) -> None:
    from megatron.core.models.multimodal.llava_model import LLaVAModel

    model = SimpleNamespace(sequence_parallel_lm=True, pre_process=False, post_process=False)
    with stock.patched(own_groups.PATCH):
        model.pg_collection = groups()
        assert LLaVAModel._process_embedding_token_parallel(model, *(None,) * 4) == (None,) * 4
        model.pg_collection.tp = torch.distributed.new_group([0])
        with pytest.raises(ValueError, match=r"LLaVAModel .*Megatron-LM#7452"):
            LLaVAModel._process_embedding_token_parallel(model, *(None,) * 4)


def config_of(kind: Any = None, **settings: Any) -> Any:
    fixed = {"hidden_size": H, "add_bias_linear": False, "tensor_model_parallel_size": RANKS}
    return stock.small_config(kind, **fixed | settings)


def groups() -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()


def summed(part: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks."""
    whole = part.detach().clone()
    torch.distributed.all_reduce(whole)
    return whole


def sinks(*, mla: bool) -> list[float]:
    """The norm that stock's optimizer finds for gradients of 3 and 4, in 16 bits as models are."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.optimizer.optimizer_config import OptimizerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if mla else TransformerConfig
    config = config_of(kind, softmax_type="learnable", init_method=torch.nn.init.zeros_)
    spec = get_gpt_layer_local_spec(multi_latent_attention=mla).submodules.self_attention

    class Core(DotProductAttention):
        """Megatron's, which takes no widths; Transformer Engine's does."""

        def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    spec.submodules.core_attention = Core
    attention = build_module(spec, config=config, layer_number=1, pg_collection=groups())
    offset = attention.bfloat16().core_attention.softmax_offset
    offset.grad = torch.tensor([0.0, 3.0 + groups().tp.rank()], dtype=torch.bfloat16)
    optimizer = FP32Optimizer(torch.optim.SGD([offset], 1.0), OptimizerConfig(), lambda *_: None)
    optimizer.grad_stats_parallel_group = optimizer.tp_group = groups().tp
    return [float(optimizer.get_grad_norm())]


def output_norm(right: list[float]) -> list[float]:
    """The gradient of a gated delta net's output norm on this rank, as the optimizer gets it; the ranks' sum into ``right``."""
    from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads as reduce
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, common
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from megacpp_mcore.layer_specs.parts import TorchNorm

    stock.restart_random()
    config = config_of(
        linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
        linear_num_value_heads=2, activation_func=torch.nn.functional.silu, deterministic_mode=True,
    )  # fmt: skip
    parts = common.GatedDeltaNetSubmodules(ColumnParallelLinear, TorchNorm, RowParallelLinear)
    with mock.patch.object(common, "HAVE_FLA", True):  # whose place deterministic_mode takes
        layer = GatedDeltaNet(config, parts, layer_number=1, use_qk_l2norm=False, pg_collection=groups())
    layer.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    layer = layer.bfloat16().float()  # as a model is wrapped after it is built
    generator = torch.Generator().manual_seed(5)
    output, _ = layer(torch.randn(S, B, H, generator=generator), None)
    (1e4 * output * torch.randn(output.shape, generator=generator)).sum().backward()
    weight = layer.out_norm.weight
    right[:] = right or summed(weight.grad).tolist()
    reduce([layer], config, groups().tp)
    return weight.grad.tolist()


def label_smoothing(right: list[float]) -> list[float]:
    """The losses, and the gradients of this rank's logits; of all logits as PyTorch computes them into ``right``."""
    from megatron.core import tensor_parallel

    smoothing, rank = 0.1, groups().tp.rank()
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(S, B, V, generator=generator, requires_grad=True)
    labels = torch.randint(0, V, (S, B), generator=generator)
    # With PyTorch's smoothing the label has its share of it, too.
    losses = torch.nn.functional.cross_entropy(
        whole.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing * V / (V - 1)
    )
    losses.square().sum().backward()
    right[:] = [*losses.tolist(), *whole.grad.chunk(RANKS, -1)[rank].flatten().tolist()]
    part = whole.detach().chunk(RANKS, -1)[rank].clone().requires_grad_()
    losses = tensor_parallel.vocab_parallel_cross_entropy(part * 1.0, labels, smoothing)
    losses.square().sum().backward()
    return [*losses.flatten().tolist(), *part.grad.flatten().tolist()]


def gathered_logits(right: list[float]) -> list[float]:
    """The mean loss of a model with ``parallel_output`` false, and the norm of its head's gradient; else into ``right``."""
    from tests.patches.test_linear_cross_entropy import gpt, outcome

    model = gpt(tensor_model_parallel_size=RANKS, mtp_num_layers=None)

    def figures() -> list[float]:
        found = outcome(model)
        return [float(found["losses"].mean()), float(found["output_layer.weight"].norm())]

    right[:] = right or figures()
    model.output_layer.gather_output = True
    return figures()


def padding_mask(right: list[float]) -> list[float]:
    """The router's gradient of the loss that balances experts, by token; of one rank with all tokens into ``right``."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.moe.router import TopKRouter

    rank, alone = groups().tp.rank(), [torch.distributed.new_group([each]) for each in range(RANKS)]
    generator = torch.Generator().manual_seed(5)
    tokens, weight = (torch.randn(*shape, generator=generator) for shape in ((RANKS * S, B, H), (4, H)))
    is_padding = torch.arange(RANKS * S)[:, None].expand(-1, B) >= RANKS * S - 2
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0))

    def gradient(part: slice, **own: Any) -> torch.Tensor:
        config = config_of(
            num_moe_experts=4, moe_router_topk=2, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1.0,
            calculate_per_token_loss=True, sequence_parallel=True,
        )  # fmt: skip
        router = TopKRouter(config, pg_collection=groups())
        vars(router).update(own)
        router.weight.data.copy_(weight)
        probabilities, _ = router(tokens[part], is_padding[part])
        (0 * probabilities.sum()).backward()
        return router.weight.grad

    right[:] = right or gradient(slice(None), tp_cp_group=alone[rank], tp_dp_cp_group=alone[rank]).flatten().tolist()
    return summed(gradient(slice(rank * S, (rank + 1) * S))).flatten().tolist()


def masked_loss() -> list[float]:
    """The mean over two ranks of what Megatron makes of the losses 1, 2 and 3 on one of them, and of 7 on the other: 13 / 4.

    By both ways in which it learns how many ranks share a sequence: from the global group, and from its caller.
    """
    from megatron.core.pipeline_parallel import schedules

    own = (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([7.0]))[groups().cp.rank()]
    config = config_of(tensor_model_parallel_size=1, context_parallel_size=RANKS)
    found = []
    for sizes in ({}, {"cp_group_size": RANKS, "is_last_stage": True}):
        loss, _ = schedules.forward_step_calc_loss(
            SimpleNamespace(), own, lambda losses: (losses.sum(), torch.tensor(len(losses)), {}), config, None, False, 1, [],
            **sizes,
        )  # fmt: skip
        found.append(float(summed(loss)) / RANKS)
    return found


def of_mtp(*, by_token: bool) -> list[float]:
    """How much each token that counts weighs in the gradient of MTP's one depth, here and on the other rank."""
    from megatron.core.transformer.multi_token_prediction import process_mtp_loss

    rank = torch.distributed.get_rank()
    config = config_of(tensor_model_parallel_size=1, mtp_num_layers=1, mtp_loss_scaling_factor=1.0)
    config.calculate_per_token_loss = by_token
    mask = torch.tensor([[[1, 1, 1, 1]], [[0, 1, 0, 0] if by_token else [1, 1, 1, 1]]])[rank]
    hidden = torch.ones(8, 1, 1, requires_grad=True)  # the trunk's, and those of the depth
    output = process_mtp_loss(
        hidden, torch.zeros_like(mask), mask, lambda hidden, **_: (hidden, None), None, None, False,
        lambda labels, logits: logits.flatten()[None], config, cp_group=groups().cp,
    )  # fmt: skip
    (0 * output).sum().backward()
    return [float(summed(hidden.grad[4:] * (rank == each)).max()) for each in range(RANKS)]


def mask_of_own_group(own: Any) -> list[float]:
    """How many tokens GPTModel's mask has on each of two ranks that are a group of its own, of four in the whole row."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    model = SimpleNamespace(
        config=SimpleNamespace(sequence_parallel=True), pre_process=True, pg_collection=SimpleNamespace(tp=own),
        position_embedding_type="none", rotary_pos_emb=None, embedding=mock.Mock(scatter_to_sequence_parallel=True),
    )  # fmt: skip
    model.embedding.return_value = torch.zeros(4 // RANKS, 1, H)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    mask = GPTModel._preprocess(model, tokens, tokens, padding_mask=tokens.bool())[5]
    return [float(mask.shape[1])]


def projections_of_own_group(own: Any) -> list[float]:
    """Rows of the projection of queries on one of two ranks that are a group of its own."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    parts = (ColumnParallelLinear, ColumnParallelLinear, DotProductAttention, RowParallelLinear)
    made = attention.CrossAttention(
        config_of(), attention.CrossAttentionSubmodules(*parts), 1,
        pg_collection=SimpleNamespace(tp=own, cp=groups().cp),
    )  # fmt: skip
    return [float(made.linear_q.weight.shape[0]), float(made.linear_kv.weight.shape[0])]


def main(folder: Path) -> dict[str, Any]:
    """The figures of one rank."""
    found: dict[str, Any] = {case: {"right": []} for case in (*CASES, *OF_ROWS, *OF_REPLICAS)}
    found["sinks"]["right"] = found["sinks of MLA"]["right"] = [5.0]
    found["masked loss"]["right"] = [13 / 4, 13 / 4]
    found["MTP by token"]["right"] = [5 / 4, 5 / 4]  # of five tokens four can be predicted
    found["MTP in rows"]["right"] = [2 / 7, 2 / 7]  # of eight seven, and the ranks are averaged
    arms = {"stock": (), "patched": PATCHES}
    found["mask of own group"]["right"] = [4 / RANKS]
    found["projections of own group"]["right"] = [H / RANKS, 2 * H / RANKS]
    with stock.one_process(folder / "replicas", tensor_model_parallel_size=1):
        own = torch.distributed.new_group(list(range(RANKS)))
        for arm, patches in arms.items():
            with stock.patched(*patches):
                found["MTP by token"][arm] = of_mtp(by_token=True)
                found["mask of own group"][arm] = mask_of_own_group(own)
                found["projections of own group"][arm] = projections_of_own_group(own)
    with stock.one_process(folder / "rows", context_parallel_size=RANKS):
        for arm, patches in arms.items():
            with stock.patched(*patches):
                found["masked loss"][arm] = masked_loss()
                found["MTP in rows"][arm] = of_mtp(by_token=False)
    with stock.one_process(folder / "store", tensor_model_parallel_size=RANKS):
        for arm, patches in arms.items():
            with stock.patched(*patches):
                found["sinks"][arm], found["sinks of MLA"][arm] = sinks(mla=False), sinks(mla=True)
                found["output norm"][arm] = output_norm(found["output norm"]["right"])
                found["label smoothing"][arm] = label_smoothing(found["label smoothing"]["right"])
                found["gathered logits"][arm] = gathered_logits(found["gathered logits"]["right"])
                found["padding mask"][arm] = padding_mask(found["padding mask"]["right"])
    return found
