"""Everything in this folder needs a GPU; the marker is put on here, and the skip says so."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark and, without a GPU, skip the tests of this folder."""
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; torch.cuda.is_available() is False"))
