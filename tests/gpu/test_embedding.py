"""The embedding's gradient by rows on a GPU: parity, equal bits again, a CUDA graph; and memory for its tokens only."""

from __future__ import annotations

import pytest
import torch

from megacpp_mcore.ops import embedding
from megacpp_mcore.ops.main_grad import MainGrad
from tests.gpu.device import assert_replays, peak
from tests.ops import embedding_case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("total", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [True, False])
def test_parity_and_equal_bits(total: torch.dtype, transposed: bool) -> None:
    sizes = {"B": 2, "S": 4096, "V": 65_536, "D": 3584}
    embedding_case.compared("cuda", **sizes, dtype=torch.bfloat16, total=total, transposed=transposed)


def test_a_graph_replays_for_other_tokens() -> None:
    draw = torch.Generator("cuda").manual_seed(0)
    tokens = [torch.randint(0, 256, (2, 512), device="cuda", generator=draw) for _ in range(2)]
    gradient = torch.randn(2, 512, 3584, device="cuda", generator=draw).bfloat16()

    def added() -> list[torch.Tensor]:
        total = torch.zeros(256, 3584, device="cuda")
        embedding.add_gradient(total, tokens[0], gradient)
        return [total]

    assert_replays(added, tokens[:1], tokens[1:])


def test_nothing_of_the_tables_size_is_allocated() -> None:
    weight = torch.randn(65_536, 3584, device="cuda").bfloat16().requires_grad_()
    main_grad = MainGrad(torch.zeros(65_536, 3584, device="cuda"), lambda: None)
    token = torch.arange(512, device="cuda").view(1, -1)
    embedding.embedding(token, weight, main_grad).sum().backward()  # compiles
    assert peak(lambda: embedding.embedding(token, weight, main_grad).sum().backward()) < 2**25
