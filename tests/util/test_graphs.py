from __future__ import annotations

import pytest
import torch

from megacpp_mcore.util.graph_reset import reset_graphs


class Graph:
    """Stands for PyTorch's, which no machine without a GPU makes."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1
        if self.error is not None:
            raise self.error


def test_every_graph_is_reset_whatever_another_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    graphs = [Graph(RuntimeError("device-side assert")), Graph()]
    reset_graphs()
    assert [graph.resets for graph in graphs] == [1, 1]
