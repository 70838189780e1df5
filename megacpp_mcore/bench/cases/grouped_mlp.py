"""Routed experts, rows sorted by expert: ours, Transformer Engine's GroupedLinear, and PyTorch's grouped products.

Legend: T rows (each token once per expert it is routed to), E experts, D hidden, F expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megacpp_mcore.bench.cases.peers import ENGINE, lacking
from megacpp_mcore.bench.parity import AgainstTruth, in_double
from megacpp_mcore.bench.problem import Draw, Floor, Inputs, Problem, Tensors, Variant
from megacpp_mcore.bench.registry import OURS, PEER, Options
from megacpp_mcore.model.flops import feed_forward
from megacpp_mcore.ops.grouped_mlp.reference import grouped_mlp
from megacpp_mcore.te import imports

LIMITS = {"bfloat16": 5e-3, "float32": 1e-5}
ROUNDED = 3e-2
"""For peers, which round the hidden activation to the dtype of their inputs."""


def problem(options: Options) -> Problem:
    """Every implementation on one set of rows and weights."""
    E, D, width = options.sizes("experts", "hidden", "expert_width")
    T, draw = options.shape["B"] * options.shape["S"] * options.shape["routed"], Draw(options)
    counts_E = torch.bincount(draw.integers(E, T), minlength=E)
    inputs = Inputs(
        leaves=draw.leaves(
            x=draw.normal(T, D),
            w1=draw.normal(E, width, D, scale=D**-0.5),
            w2=draw.normal(E, D, width, scale=width**-0.5),
            probs=torch.rand(T, generator=draw.generator, device=options.device),
        ),
        cotangents={"y": draw.normal(T, D)},
        fixed={"counts": counts_E},
    )

    def reference(inputs: Inputs) -> torch.Tensor:
        x, w1, w2, probs = inputs.leaves.values()
        return grouped_mlp(x, inputs.fixed["counts"], w1, w2, probs)

    weights, rows = 2 * E * D * width * draw.itemsize, T * D * draw.itemsize
    return Problem(
        shape={**options.shape, "T": T},
        inputs=inputs,
        variants=[
            _grouped_mm(options),
            _engine(options, inputs, counts_E.tolist()),
            Variant.of("reference", OURS, reference),
        ],
        works=Floor.pair(feed_forward(T, D, width), weights + 2 * rows, 3 * weights + 5 * rows, options.dtype),
        check=AgainstTruth(in_double(reference, inputs), LIMITS[options.dtype]),
    )


def _grouped_mm(options: Options) -> Variant:
    name = "torch._grouped_mm"
    if options.dtype != "bfloat16":
        return Variant.missing(name, f"it takes bfloat16, not {options.dtype}")
    if any(width % 8 for width in options.sizes("hidden", "expert_width")):
        return Variant.missing(name, "it takes widths that are multiples of 8")

    def call(inputs: Inputs) -> torch.Tensor:
        x, w1, w2, probs = inputs.leaves.values()
        ends_E = inputs.fixed["counts"].cumsum(0).to(torch.int32)
        hidden = F.gelu(torch._grouped_mm(x, w1.transpose(1, 2), offs=ends_E))
        hidden = (hidden * probs[:, None]).to(x.dtype)
        return torch._grouped_mm(hidden, w2.transpose(1, 2), offs=ends_E)

    return Variant.of(name, PEER, call, limit=ROUNDED)


def _engine(options: Options, inputs: Inputs, counts: list[int]) -> Variant:
    name = "TE GroupedLinear"
    if reason := lacking(options.device, ENGINE, "Transformer Engine"):
        return Variant.missing(name, reason)
    dtype = getattr(torch, options.dtype)
    linears = []
    for weight_EOI in (inputs.leaves["w1"], inputs.leaves["w2"]):
        experts, outputs, width = weight_EOI.shape
        linear = imports.entry("GroupedLinear")(
            experts, width, outputs, bias=False, params_dtype=dtype, device=options.device
        )
        with torch.no_grad():
            for number, weight in enumerate(weight_EOI):
                getattr(linear, f"weight{number}").copy_(weight)
        linears.append(linear)
    weights = [getattr(linear, f"weight{number}") for linear in linears for number in range(len(counts))]

    def call(inputs: Inputs) -> torch.Tensor:
        hidden = (F.gelu(linears[0](inputs.leaves["x"], counts)) * inputs.leaves["probs"][:, None]).to(dtype)
        output: torch.Tensor = linears[1](hidden, counts)
        return output

    def differentiated(inputs: Inputs) -> Tensors:
        return [inputs.leaves["x"], inputs.leaves["probs"], *weights]

    def results(found: Tensors) -> Tensors:
        """The gradient of each matrix of weights is one tensor an expert."""
        if len(found) == 1:
            return found
        y, dx, dprobs, *gradients = found
        return [y, dx, *(torch.stack(gradients[start:][: len(counts)]) for start in (0, len(counts))), dprobs]

    return Variant.of(name, PEER, call, leaves=differentiated, results=results, limit=ROUNDED)
