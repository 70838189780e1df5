"""Products whose rows are gathered or scattered: those of whole tensors, in pieces that leave the rows time to arrive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed

from megacpp_mcore.layer_specs import exchange
from megacpp_mcore.ops.main_grad import MainGrad
from tests import stock
from tests.distributed.test_tensor_parallel_sums import config_of, summed

pytestmark = pytest.mark.slow

RANKS, ROWS, BATCH, WIDTHS, INNER = 3, 4, 2, (6, 5), 7
BEGINS = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
GATHER, SCATTER, SWAP = BEGINS
CASES = [(pieces, fused) for pieces in (True, False) for fused in (True, False)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return stock.on_ranks("tests.distributed.test_products", RANKS, tmp_path_factory.mktemp("products"))


@pytest.mark.parametrize(("pieces", "fused"), CASES)
@pytest.mark.parametrize("kind", ["gathered", "scattered"])
def test_every_output_and_gradient(found: list[dict[Any, Any]], kind: str, pieces: bool, fused: bool) -> None:
    for of_rank in found:
        made, right = of_rank[kind, pieces, fused], of_rank[kind]
        assert made["tensors"].keys() == right.keys()
        for name, expected in right.items():
            assert expected.norm() > 0
            torch.testing.assert_close(made["tensors"][name], expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("rank", range(RANKS))
def test_own_rows_are_multiplied_while_those_of_others_are_sent(found: list[dict[Any, Any]], rank: int) -> None:
    others = 2 if rank == 1 else 1  # before and after its own
    products, count = ["product"], len(WIDTHS)
    gathered, scattered = (found[rank][kind, True, False]["events"] for kind in ("gathered", "scattered"))
    assert gathered["forward"] == [GATHER, *products * count, "end", *products * count * others]
    assert gathered["backward"] == [*products, SCATTER, "end"]  # other products add to what there is
    assert scattered["forward"] == [*products * others, SWAP, *products, "end"]
    assert scattered["backward"] == [GATHER, *products, "end", *products * others]


def test_few_rows_are_not_cut(found: list[dict[Any, Any]]) -> None:
    for of_rank in found:
        gathered, scattered = (of_rank[kind, False, False]["events"] for kind in ("gathered", "scattered"))
        assert gathered["forward"] == [GATHER, "end", *["product"] * len(WIDTHS)]
        assert scattered["backward"] == [GATHER, "end", "product"]


@pytest.mark.parametrize("worth", [0, 2**40])
def test_a_row_parallel_layer_sends_what_is_large(found: list[dict[Any, Any]], worth: int) -> None:
    for of_rank in found:
        made = of_rank["layer", worth]
        for name, expected in of_rank["layer of stock"].items():
            torch.testing.assert_close(made["tensors"][name], expected, msg=lambda text, name=name: f"{name}: {text}")
        assert (SWAP in made["events"]["forward"]) == (worth == 0)
        assert SWAP not in of_rank["layer in a scope"]


# --- On each rank -------------------------------------------------------------------------------------------------------


class _Late:
    """A collective that begins, and ends, when it is waited for: what is read before is not there."""

    def __init__(self, events: list[str], run: Any) -> None:
        self.events, self.run = events, run

    def wait(self) -> None:
        self.events.append("end")
        self.run()


@contextmanager
def watched(events: list[str]) -> Iterator[None]:
    """Note collectives and products; the former are as late as they may be."""

    def late(name: str, collective: Any) -> Any:
        def begin(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            events.append(name)
            return _Late(events, lambda: collective(*args, **kwargs)) if async_op else collective(*args, **kwargs)

        return begin

    def product(*args: Any, run: Any = torch.mm, **kwargs: Any) -> torch.Tensor:
        events.append("product")
        made: torch.Tensor = run(*args, **kwargs)
        return made

    collectives = {name: late(name, getattr(distributed, name)) for name in BEGINS}
    with mock.patch.multiple(distributed, **collectives), mock.patch.object(torch, "mm", product):
        yield


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def run(compute: Any, rows: torch.Tensor, weights: list[torch.Tensor], *, fused: bool) -> dict[str, Any]:
    """Outputs and gradients of ``compute`` on leaves, and in what order it went; fused gradients are added to 1."""
    events: dict[str, list[str]] = {"forward": [], "backward": []}
    main_grads = [MainGrad(torch.ones_like(one), lambda: None) if fused else None for one in weights]
    with watched(events["forward"]):
        outputs = compute(rows, weights, main_grads)
    with watched(events["backward"]):
        total = sum((output * (output.detach() + index)).sum() for index, output in enumerate(outputs))
        gradients = torch.autograd.grad(total, [rows, *weights], allow_unused=fused)
    if fused:
        assert gradients[1:] == (None,) * len(weights)
    of_weights = [main_grad.buffer - 1 if main_grad else one for main_grad, one in zip(main_grads, gradients[1:], strict=True)]
    named = {f"output {index}": one.detach() for index, one in enumerate(outputs)}
    named |= {"rows": gradients[0]} | {f"weight {index}": one for index, one in enumerate(of_weights)}
    return {"tensors": named, "events": events}


def whole_gathered(rows: torch.Tensor, weights: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What one rank with all rows has of them, and this one's parts of what is summed."""
    parts = [torch.empty_like(rows) for _ in range(RANKS)]
    distributed.all_gather(parts, rows.detach())
    whole = torch.cat(parts).requires_grad_()
    outputs = [whole @ weight.t() for weight in weights]
    total = sum((output * (output.detach() + index)).sum() for index, output in enumerate(outputs))
    of_whole, *of_weights = torch.autograd.grad(total, [whole, *weights])
    named = {f"output {index}": one.detach() for index, one in enumerate(outputs)}
    named["rows"] = summed(of_whole)[distributed.get_rank() * ROWS :][:ROWS]
    return named | {f"weight {index}": one for index, one in enumerate(of_weights)}


def whole_scattered(x: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    output = x @ weight.t()
    whole = summed(output)
    dx, dweight = torch.autograd.grad(output, [x, weight], whole)
    return {"output 0": whole[distributed.get_rank() * ROWS :][:ROWS], "rows": dx, "weight 0": dweight}


def of_layer(worth: int, config: Any, kind: Any, x: torch.Tensor, weight: torch.Tensor) -> dict[str, Any]:
    """As :func:`run`, of a row-parallel layer with that weight."""
    given = {"bias": False, "input_is_parallel": True, "skip_bias_add": False, "init_method": torch.nn.init.zeros_}
    layer = kind(INNER * RANKS, WIDTHS[0], config=config, tp_group=distributed.group.WORLD, **given).double()
    layer.weight.data.copy_(weight)

    def compute(rows: torch.Tensor, *_: Any) -> list[torch.Tensor]:
        output, bias = layer(rows)
        assert bias is None
        return [output]

    with mock.patch.object(exchange, "WORTH_PIECES", worth):
        return run(compute, x, [layer.weight], fused=False)


def main(folder: Path) -> dict[Any, Any]:
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    from megacpp_mcore.layer_specs.parts import scattering
    from megacpp_mcore.te import fp8_scopes

    with stock.one_process(folder / "store", tensor_model_parallel_size=RANKS):
        rank, group = distributed.get_rank(), distributed.group.WORLD
        rows, x = drawn(rank, ROWS, BATCH, INNER), drawn(10 + rank, ROWS * RANKS, BATCH, INNER)
        weights = [drawn(20 + rank, WIDTHS[0], INNER), drawn(30, WIDTHS[1], INNER)]  # of a rank each, and of all
        found: dict[Any, Any] = {"gathered": whole_gathered(rows, weights), "scattered": whole_scattered(x, weights[0])}

        def scattered(x: torch.Tensor, weights: Any, main_grads: Any) -> list[torch.Tensor]:
            return [exchange.scattered_product(x, weights[0], main_grads[0], group)]

        for pieces, fused in CASES:
            with mock.patch.object(exchange, "WORTH_PIECES", 0 if pieces else 2**40):
                found["gathered", pieces, fused] = run(
                    lambda *given: exchange.gathered_products(*given, group), rows, weights, fused=fused
                )
                found["scattered", pieces, fused] = run(scattered, x, weights[:1], fused=fused)
        sizes = {"tensor_model_parallel_size": RANKS, "num_attention_heads": RANKS, "hidden_size": INNER * RANKS}
        config = config_of(sequence_parallel=True, **sizes)
        found["layer of stock"] = of_layer(0, config, RowParallelLinear, x, weights[0])["tensors"]
        for worth in (0, 2**40):
            found["layer", worth] = of_layer(worth, config, scattering(RowParallelLinear), x, weights[0])
        with mock.patch.object(fp8_scopes, "_active", ["a layer"]):
            of_scope = of_layer(0, config, scattering(RowParallelLinear), x, weights[0])
        found["layer in a scope"] = of_scope["events"]["forward"]
        return found
