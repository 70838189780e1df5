"""E: a mixture-of-experts layer: stock's MoELayer with this package's routed experts, or with stock's.

Stock has one parameter per expert and matrix, and runs the experts on rows that its dispatcher has permuted. Ours stack all
experts into one parameter per matrix, which a grouped GEMM reads in place; they take the tokens unpermuted, with their routing,
without a host sync. With expert parallelism this needs ``--moe-token-dispatcher-type allgather``: tokens are all-gathered over
ranks during the router (not with tensor parallelism), and sums over ranks are reduce-scattered during the shared expert; so are
their gradients. Initial values and distributed checkpoints are stock's.

Shape legend: S sequence, B batch, T tokens or rows routed to this rank's experts, N experts of this rank, E all experts,
D hidden, F expert width.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.extensions.transformer_engine import Fp8Padding, Fp8Unpadding
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from megatron.training import global_vars

from megacpp_mcore.backends import STOCK, Dispatcher, Resolution
from megacpp_mcore.backends.candidates import EXPERTS
from megacpp_mcore.errors import BackendError, ModelError
from megacpp_mcore.layer_specs import router
from megacpp_mcore.layer_specs.exchange import Exchange
from megacpp_mcore.layer_specs.gradients import main_grad_of
from megacpp_mcore.layer_specs.initial import drawn_by_input_size
from megacpp_mcore.layer_specs.norm import residual_norm
from megacpp_mcore.layer_specs.parts import Parts, UncutLinear, backend_needs, compute_device
from megacpp_mcore.model.precision import in_bf16_zone
from megacpp_mcore.util import te_imports
from megacpp_mcore.util.te_imports import ALIGNMENT

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import ExpertsBuilder

_ELEMENTWISE = ("adam", "sgd", "lion")
"""Elementwise optimizers: safe for 3-D (stacked) parameters, which others do not treat as matrices (megatron-core 0.19.2,
``optimizer/emerging_optimizers.py``)."""


def expert_layer_spec(config: TransformerConfig, parts: Parts, dispatcher: Dispatcher) -> ModuleSpec:
    """Return the spec of an E layer: norm, router + routed experts + shared expert, residual; no sequence mixer.

    With a per-module precision file in ``config`` (:data:`megacpp_mcore.model.precision.EXPERTS_FILE`), the routed experts run
    in FP8, except in the model's first and last layer. The shared expert, which every token passes, stays in BF16.

    Raises:
        BackendError, ModelError: as :func:`choose_experts`, or the token dispatcher needs a package that is not installed.
    """
    flex, package = config.moe_token_dispatcher_type == "flex", "deep_ep"
    if flex and config.moe_flex_dispatcher_backend == "deepep" and importlib.util.find_spec(package) is None:
        raise ModelError(
            f"--moe-token-dispatcher-type flex needs {package}, which is not installed; install it, or pass "
            "--moe-token-dispatcher-type alltoall"
        )
    mlp: Any = get_moe_module_spec_for_backend(
        backend=parts.backend, num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
    )
    submodules = _linears(mlp.keywords["submodules"], config, parts)
    if config.quant_recipe is not None:
        linears: GroupedMLPSubmodules = submodules.experts.keywords["submodules"]
        ours = dataclasses.replace(
            linears, linear_fc1=fp8_linear(linears.linear_fc1), linear_fc2=fp8_linear(linears.linear_fc2)
        )
        submodules = dataclasses.replace(submodules, experts=partial(FP8Experts, submodules=ours))
    experts = choose_experts(config, dispatcher)
    needs = backend_needs(config) | {"dtype": torch.float32, "experts": config.num_moe_experts}
    routing = dispatcher.resolve_or_stock("router", router.why_stock_router(config), **needs)
    submodules = dataclasses.replace(
        submodules,
        experts=experts.fn(submodules.experts, dispatcher),
        router=routing.fn if routing.observed == STOCK else partial(router.Router, route=routing.fn),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=residual_norm(parts, dispatcher),
            mlp=partial(ExpertsLayer, submodules=submodules, backends=(experts, routing)),
            mlp_bda=add_to_residual,
        ),
    )


def choose_experts(config: TransformerConfig, dispatcher: Dispatcher) -> Resolution:
    """Choose our routed experts or stock's; stock's if the run needs a feature that only they have, or kernels we lack.

    Raises:
        BackendError: the run requests ours by name and also such a feature, or only backends of an op that does not run.
    """
    why = why_stock_experts(config)
    op, needs = expert_op(config)
    if why is None and compute_device() == "cuda" and dispatcher.is_automatic(EXPERTS) and dispatcher.is_automatic(op):
        lacking = dispatcher.without_kernel(op, **needs)
        why = lacking and f"these experts by kernels ({op}: {lacking})"
    chosen = dispatcher.resolve_or_stock(EXPERTS, why)
    named = [name for name in ("routed_mlp", "grouped_mlp") if not dispatcher.is_automatic(name)]
    if named and (chosen.observed == STOCK or op not in named):
        runs, remedy = (
            (f"Megatron's experts ({chosen.reason})", "remove one of the two")
            if chosen.observed == STOCK
            else (op, f"name {op}")
        )
        # Tokens cannot be gathered where the dispatcher runs the shared expert.
        has_choice = config.expert_model_parallel_size > 1 and not config.moe_shared_expert_overlap
        if has_choice and chosen.observed != STOCK:
            other = "alltoall" if takes_tokens(config) else "allgather"
            remedy += f", or pass --moe-token-dispatcher-type {other}"
        raise BackendError(f"`backends` requests {' and '.join(named)}, but this run uses {runs}; {remedy}")
    return chosen


def expert_op(config: TransformerConfig) -> tuple[str, dict[str, Any]]:
    """Return the op of our routed experts, ``routed_mlp`` where they take tokens, and what its backend has to support."""
    ranks = config.expert_model_parallel_size
    sizes = {
        "hidden": config.hidden_size,
        "ffn": config.moe_ffn_hidden_size,
        "experts": config.num_moe_experts // ranks,
        "expert_ranks": ranks,
    }
    return "routed_mlp" if takes_tokens(config) else "grouped_mlp", sizes | backend_needs(config)


def takes_tokens(config: TransformerConfig) -> bool:
    """Return whether our experts take tokens, gathered if experts are divided, rather than the rows of stock's dispatcher."""
    # With moe_shared_expert_overlap the dispatcher runs the shared expert, during the all-to-all.
    gathered = config.expert_model_parallel_size == 1 or config.moe_token_dispatcher_type == "allgather"
    return gathered and not config.moe_shared_expert_overlap


def why_stock_experts(config: TransformerConfig) -> str | None:
    """Name the first requested feature that only stock's experts support, or None."""
    arguments = global_vars._GLOBAL_ARGS  # get_args() would assert
    of_bridge = getattr(config, "megacpp_optimizer", "adam")  # whose loop has no arguments
    optimizer = getattr(arguments, "optimizer", of_bridge)
    offloaded = {"expert_fc1", "moe_act", "fused_group_mlp"} & set(config.offload_modules or ())
    flex = config.moe_flex_dispatcher_backend if config.moe_token_dispatcher_type == "flex" else "deepep"
    # Our kernels save no activations; the reference, used for other dtypes, saves what autograd saves.
    kept = config.params_dtype != torch.bfloat16 and "moe_act" in (config.recompute_modules or ())
    for requested, feature in (
        (config.quant_recipe is not None, "FP8 experts (--te-precision-config-file)"),
        (config.moe_router_padding_for_quantization, "--moe-router-padding-for-quantization"),
        (flex != "deepep", f"--moe-flex-dispatcher-backend {flex}, which pads rows"),
        (config.expert_gtp_weight_remat_size > 1, "expert weights sharded over data-parallel ranks"),
        (config.moe_single_grouped_weight, "--moe-single-grouped-weight"),
        (config.use_transformer_engine_op_fuser, "--use-transformer-engine-op-fuser"),
        (config.overlap_dispatch_backward_with_experts_wgrad, "--overlap-dispatch-backward-with-experts-wgrad"),
        (config.fine_grained_activation_offloading and offloaded, f"offloaded {', '.join(sorted(offloaded))}"),
        (config.init_model_with_meta_device, "--init-model-with-meta-device"),
        (
            getattr(arguments, "use_megatron_fsdp", False),
            "--use-megatron-fsdp, whose checkpoints number experts by name",
        ),
        (
            getattr(arguments, "save_tokens_per_expert_interval", None),
            "--save-tokens-per-expert-interval, which reads the input of Transformer Engine's experts",
        ),
        (optimizer not in _ELEMENTWISE, f"--optimizer {optimizer}, which takes matrices one by one"),
        (config.recompute_granularity == "selective" and kept, f"--recompute-modules moe_act in {config.params_dtype}"),
    ):
        if requested:
            return feature
    return None


def own_experts(stock: ExpertsBuilder, dispatcher: Dispatcher) -> ExpertsBuilder:
    """Return a builder of :class:`StackedExperts` with the initial values of the experts that ``stock`` builds."""
    return partial(StackedExperts, stock=stock, dispatcher=dispatcher)


def stock_experts(stock: ExpertsBuilder, _: Dispatcher) -> ExpertsBuilder:
    """Return ``stock`` itself: the experts of ``--transformer-impl`` and ``--moe-grouped-gemm``."""
    return stock


class ExpertsLayer(MoELayer):
    """Stock's MoELayer, which passes tokens to its experts unpermuted if they accept that.

    The token dispatcher is then bypassed: the experts take the routing map and return the sum over each token's experts. With
    expert parallelism, each rank takes all ranks' tokens with the columns of its own experts, and sums over ranks are rounded
    to the dtype of the tokens.

    Args:
        backends: the chosen routed experts and router in ``submodules``; for receipts.
    """

    def __init__(self, config: TransformerConfig, *args: Any, backends: tuple[Resolution, Resolution], **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.experts_backend, self.router_backend = backends
        self.takes_tokens = isinstance(self.experts, StackedExperts) and self.experts.takes_tokens
        self.gathers_tokens = self.takes_tokens and self.ep_group.size() > 1
        self._routing_TE: torch.Tensor | None = None
        self._readers: Sequence[torch.Tensor] = ()
        self._shared_input: torch.Tensor | None = None
        self._tokens: Exchange | None = None
        self._shared: torch.Tensor | None = None
        sums = self.takes_tokens and self.use_shared_expert and compute_device() == "cuda"
        self.adds_three = sums and not (self.moe_layer_recompute or config.fp32_residual_connection)
        if self.takes_tokens:
            self.token_dispatcher = None

    def set_layer_number(self, layer_number: int) -> None:
        """Set the 1-based layer number over all pipeline stages, as TransformerLayer does, also in FP8 experts."""
        super().set_layer_number(layer_number)
        if isinstance(self.experts, FP8Experts):
            self.experts.set_layer_number(layer_number)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the stock method; in training on a GPU the shared expert's output is returned as the bias, not added yet."""
        output, bias = super().forward(*args, **kwargs)
        shared, self._shared = self._shared, None
        return output, bias if shared is None else shared

    def shared_experts_compute(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Run the shared expert, the first of three readers of the input; with gathered tokens, :meth:`combine` does."""
        if self.adds_three and self.training:
            from megacpp_mcore.ops.add import fork3

            hidden_states, *self._readers = fork3(hidden_states)
        if self.gathers_tokens:
            self._shared_input = hidden_states
            self._tokens = Exchange(self._readers[1] if self._readers else hidden_states, self.ep_group, gathers=True)
            if self.attn_tp_group.size() > 1:
                # The router reduces over these ranks, and NCCL needs collectives of two groups in the same order everywhere,
                # which branches of a graph do not guarantee.
                self._tokens.end()
            return None
        return super().shared_experts_compute(hidden_states)

    def route(self, hidden_states: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Route the tokens."""
        reader = self._readers[0] if self._readers else hidden_states
        probs, routing_map = super().route(reader, *args)
        return probs, routing_map

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the routing map ``[T, E]`` for the experts. With gathered tokens: all ranks' tokens, this rank's experts."""
        if not self.takes_tokens:
            return super().preprocess(hidden_states, probs, routing_map)
        if self._readers:
            hidden_states, self._readers = self._readers[1], ()
        if self._tokens is not None:
            # Before the probabilities are gathered, so that backward has their gradients first, and the router's meanwhile.
            hidden_states, self._tokens = self._tokens.end(), None
            local_experts = slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)
            routing_map, probs = (
                gather_from_sequence_parallel_region(tensor, group=self.ep_group)[:, local_experts]
                for tensor in (routing_map.view(torch.uint8), probs)
            )
        self._routing_TE = routing_map.bool()
        return hidden_states, probs

    def dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All-to-all tokens to their experts; if these take tokens, :meth:`preprocess` has already gathered them."""
        return (hidden_states, probs) if self.takes_tokens else super().dispatch(hidden_states, probs)

    def routed_experts_compute(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Run the routed experts. With gathered tokens the result is already summed over this rank's experts."""
        if not self.takes_tokens:
            return super().routed_experts_compute(hidden_states, probs)
        routing_TE, self._routing_TE = self._routing_TE, None
        output_TD, _ = self.experts(hidden_states.flatten(0, -2), routing_TE, probs)
        return output_TD.view_as(hidden_states), None

    def combine(self, output: torch.Tensor) -> torch.Tensor:
        """Return every token's rows, or its sum over ranks, to its rank, if it was sent; overlap the shared expert."""
        if not self.takes_tokens:
            return super().combine(output)
        if self._shared_input is not None:
            sums = Exchange(output, self.ep_group, gathers=False)
            self._shared, self._shared_input = super().shared_experts_compute(self._shared_input), None
            output = sums.end()
        return output

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> torch.Tensor:
        """Add the shared expert's output, or leave that to :func:`add_to_residual`."""
        if not self.takes_tokens:
            return super().postprocess(output, shared_expert_output)
        if self._shared is None:
            self._shared = shared_expert_output
        if self.adds_three and self.training:
            return output
        shared, self._shared = self._shared, None
        return output if shared is None else output + shared


def add_to_residual(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
    """Return stock's sum of a layer's output, bias and residual, in one kernel if the bias is another output."""
    stock = get_bias_dropout_add(training, fused)

    def add(output_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, prob: float) -> torch.Tensor:
        output, bias = output_with_bias
        if bias is not None and bias.shape[:-1] != output.shape[:-1] and bias.numel() == output.numel():
            # Packed rows: the layer flattens only the output back into one row (``_maybe_reflatten_from_moe``).
            bias = bias.transpose(0, 1).reshape(output.shape)
            output_with_bias = output, bias
        if bias is None or prob or not output.is_cuda or bias.shape != output.shape:
            return stock(output_with_bias, residual, prob)
        from megacpp_mcore.ops.add import add3

        return add3(output, bias, residual)

    return add


class StackedExperts(MegatronModule):
    """The routed experts of this rank, stacked into two parameters: ``weight1 [N, F, D]`` and ``weight2 [N, D, F]``.

    Initial values equal stock's bit for bit: stock's experts are built, then stacked. Distributed checkpoints have stock's keys
    and shards, one per expert. A plain ``state_dict`` (``--ckpt-format torch``) has the two parameters under their own names.

    Args:
        num_local_experts: N.
        config: of the run.
        stock: builds stock's experts.
        dispatcher: chooses the function that runs them.
        pg_collection: process groups.
        name: of the module in the model.
    """

    follows_transformer_impl = False  # read for receipts: the dispatcher chooses them

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        stock: ExpertsBuilder,
        dispatcher: Dispatcher,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
    ) -> None:
        super().__init__(config)
        self.ep_group, self.dp_group = pg_collection.ep, pg_collection.expt_dp
        self.num_local_experts = num_local_experts
        drawn = stock(num_local_experts, config, pg_collection=pg_collection, name=name)
        self.weight1, self.weight2 = (_stacked(matrices) for matrices in expert_matrices(drawn))
        op, needs = expert_op(config)
        self.takes_tokens = takes_tokens(config)
        self.backend = dispatcher.request(op, **needs)

    def forward(
        self, hidden_TD: torch.Tensor, routed: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run every expert on its tokens.

        Args:
            hidden_TD: tokens, or dispatched rows, expert by expert.
            routed: for tokens the routing map, bool ``[T, E]``; for rows the number of rows of each expert, ``[N]``.
            probs: routing probabilities, ``[T, E]`` or ``[T]``.

        Returns:
            ``[T, D]``: each token's probability-weighted sum over its experts, or each row's weighted output; no bias.
        """
        main_grads = [main_grad_of(weight, self.config) for weight in (self.weight1, self.weight2)]
        if self.takes_tokens:
            options: dict[str, Any] = {
                "topk": min(self.config.moe_router_topk, self.num_local_experts),
                "main_grads": main_grads,
            }
            if self.ep_group.size() > 1:
                options["exact"] = False
            return self.backend.fn(hidden_TD, routed, probs, self.weight1, self.weight2, **options), None
        return self.backend.fn(hidden_TD, routed, self.weight1, self.weight2, probs, main_grads=main_grads), None

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are never delayed here."""

    def get_extra_state(self) -> None:
        """Return None, which :meth:`sharded_state_dict` saves under the key of extra states of stock's linear layers."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore the extra state of stock's linear layers, which is FP8 state: these experts have none."""

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return the keys and shards of stock's experts (0.19.2, ``transformer/moe/experts.py``), one per expert."""
        first, count = self.ep_group.rank() * self.num_local_experts, self.ep_group.size() * self.num_local_experts
        axis, replica = len(sharded_offsets), (0, 0, self.dp_group.rank())
        places = [(*sharded_offsets, (axis, first + index, count)) for index in range(self.num_local_experts)]
        state: ShardedStateDict = {f"{prefix}_extra_state": []}
        for name, linear in (("weight1", "linear_fc1"), ("weight2", "linear_fc2")):
            key = f"{prefix}experts.{linear}."
            build = partial(_by_expert, places)
            state[f"{prefix}{name}"] = ShardedTensorFactory(f"{key}weight", self._parameters[name], build, torch.stack, replica)
            state[f"{prefix}_extra_state"] += [
                make_sharded_object_for_checkpoint(None, f"{key}_extra_state", offsets, replica) for offsets in places
            ]
        return state


def expert_matrices(experts: Any) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Return the first and the second matrices of stock's experts, expert by expert: ``[F, D]`` and ``[D, F]``."""
    numbers = range(experts.num_local_experts)
    if isinstance(experts, TEGroupedMLP):
        first, second = (
            [getattr(linear, f"weight{number}") for number in numbers] for linear in (experts.linear_fc1, experts.linear_fc2)
        )
        return first, second
    local = experts.local_experts
    return [expert.linear_fc1.weight for expert in local], [expert.linear_fc2.weight for expert in local]


def _stacked(matrices: list[torch.nn.Parameter]) -> torch.nn.Parameter:
    """Stack all matrices into one parameter, with the attributes by which Megatron reduces and shards them."""
    stacked = torch.nn.Parameter(torch.stack([matrix.detach() for matrix in matrices]))
    stacked.__dict__.update(matrices[0].__dict__)
    if getattr(stacked, "partition_dim", -1) >= 0:
        stacked.partition_dim += 1  # type: ignore[attr-defined]  # after the expert axis
    return stacked


@torch.no_grad()
def _by_expert(
    places: list[tuple[tuple[int, int, int], ...]],
    key: str,
    stacked: torch.Tensor,
    replica_id: Any,
    flattened_range: slice | None,
) -> list[ShardedTensor]:
    """Return the shards of a stacked parameter, or of its optimizer state; ``places`` has the offsets of each expert."""
    if flattened_range is not None:
        raise ModelError(
            f"{key}: stacked experts cannot be split out of a flattened shard; save with --dist-ckpt-optim-fully-reshardable"
        )
    return [
        ShardedTensor.from_rank_offsets(key, matrix, *offsets, replica_id=replica_id, prepend_axis_num=len(offsets))
        for matrix, offsets in zip(stacked.unbind(), places, strict=True)
    ]


def _linears(stock: MoESubmodules, config: TransformerConfig, parts: Parts) -> MoESubmodules:
    """Return ``stock`` with output matrices initialized by the unsharded fan-in, and a shared expert that exchanges no rows.

    The shared expert is as small as a routed one: running all of it on a rank's own rows takes less time than exchanging rows.
    With --moe-shared-expert-overlap the dispatcher exchanges them.
    """

    def drawn(experts: Any, is_uncut: bool = False) -> partial[Any]:
        stock_linears = experts.keywords["submodules"]
        linears = {"linear_fc1": stock_linears.linear_fc1, "linear_fc2": drawn_by_input_size(stock_linears.linear_fc2)}
        if is_uncut:
            linears = {name: partial(UncutLinear, whole=parts.whole_linear, cut=cut) for name, cut in linears.items()}
        return partial(experts, submodules=dataclasses.replace(stock_linears, **linears))

    shared = drawn(stock.shared_experts, is_uncut=not config.moe_shared_expert_overlap)
    return dataclasses.replace(stock, experts=drawn(stock.experts), shared_experts=shared)


def fp8_linear(stock: Any) -> Any:
    """Subclass of ``stock``, one of Megatron's grouped linear layers, that follows the precision file only if ``in_fp8``.

    After construction GPTModel and HybridModel assign each module its precision by name. That name numbers layers within the
    pipeline stage, not the model, so it cannot identify the model's first and last layer.
    """

    def finish_init(self: Any, quantization_config: Any) -> None:
        """Apply the precision file, unless the layer has to stay in BF16."""
        stock.finish_init(self, quantization_config if self.in_fp8 else None)

    return type(f"FP8{stock.__name__}", (stock,), {"in_fp8": True, "finish_init": finish_init})


class FP8Experts(TEGroupedMLP):
    """Stock's grouped experts with their GEMMs in FP8, each expert's rows padded to the alignment of FP8 GEMMs.

    Stock pads only with ``config.fp8``, which puts every layer in FP8, and not for a per-module precision file (megatron-core
    0.19.2, ``transformer/moe/experts.py``). Parameters, their names and checkpoints are stock's.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        """As the stock class.

        Raises:
            ModelError: this machine cannot run FP8.
        """
        can, why = te_imports.entry("is_fp8_available")(return_reason=True)
        if not can:
            raise ModelError(
                f"the run's precision file sets FP8 experts, which this machine cannot run: {why}; leave "
                "--te-precision-config-file out to train in BF16, or use another GPU"
            )
        super().__init__(num_local_experts, config, *args, **kwargs)
        self.in_fp8 = True
        self.layer_number: int | None = None
        self.quantization_padding = Fp8Padding(num_local_experts, align_size=ALIGNMENT)
        self.quantization_unpadding = Fp8Unpadding(num_local_experts, align_size=ALIGNMENT)

    def set_layer_number(self, layer_number: int) -> None:
        """Stay in BF16 if ``layer_number`` (from 1, over all pipeline stages) is the model's first or last."""
        self.layer_number = layer_number
        self.in_fp8 = not in_bf16_zone(layer_number, self.config.num_layers)
        for linear in (self.linear_fc1, self.linear_fc2):
            linear.in_fp8 = self.in_fp8
            if not self.in_fp8:
                linear.finish_init(None)

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
        output_buffer: torch.Tensor | None = None,
        grad_input_buffer: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map hidden ``[T, D]``, rows per expert ``[N]``, probabilities ``[T]`` → ``([T, D], no bias)``.

        Raises:
            ModelError: the precision file has not put a linear layer in FP8.
        """
        if not self.in_fp8:
            return super().forward(
                permuted_local_hidden_states, tokens_per_expert, permuted_probs, output_buffer, grad_input_buffer
            )
        self._check()
        rows = tokens_per_expert.tolist()
        hidden_TD, padded = self.quantization_padding(permuted_local_hidden_states, rows)
        probs_T1, _ = self.quantization_padding(permuted_probs.unsqueeze(-1), rows)
        output_TD, bias = super().forward(
            hidden_TD, torch.tensor(padded), probs_T1.squeeze(-1), output_buffer, grad_input_buffer
        )
        return self.quantization_unpadding(output_TD, rows), bias

    def _check(self) -> None:
        """Raise if experts for which the file requests FP8 would run in BF16; known only at the first forward pass."""
        for name in ("linear_fc1", "linear_fc2"):
            if not getattr(self, name).will_execute_quantized(False):
                raise ModelError(
                    f"layer {self.layer_number}: {name} of the experts has no FP8 recipe from the run's precision file, and "
                    "would run in BF16; build the model with Megatron's GPTModel or HybridModel, which assign it, or "
                    "leave --te-precision-config-file out"
                )
