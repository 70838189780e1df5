"""What the tests on a GPU share: a text to train on, and Megatron's process groups."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prefix of the corpus of Python's standard library."""
    from tests.gpu.runs import PYTHON, ROOT  # brings torch

    folder = tmp_path_factory.mktemp("corpus")
    command = [*PYTHON, "megacpp_mcore", "data", "corpus", "--output", str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    return str(folder / "stdlib_train")


@pytest.fixture(scope="session", autouse=True)
def _torchs_cudnn() -> None:
    """Transformer Engine is as a launch has it, in the tests' own processes too."""
    import torch  # noqa: F401

    from megacpp_mcore.util import te_imports

    os.environ |= te_imports.cudnn_home(os.environ)


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    """Give the memory that a test's tensors had back to the card: the other test processes share it."""
    yield
    import torch

    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Megatron's process groups for the tests of a module, on the GPU."""
    import torch

    from tests.gpu.runs import process_groups

    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("process") / "store"), 1)
    with process_groups(0, store=store, rank=0, world_size=1):
        yield


@pytest.fixture(autouse=True)
def _order_of_sums() -> Iterator[None]:
    """Deterministic mode ends with the test that turned it on: PyTorch's fused attention is refused in it."""
    import torch

    before = torch.get_deterministic_debug_mode()
    yield
    torch.set_deterministic_debug_mode(before)


@pytest.fixture
def filled() -> None:
    """Memory that is not written first reads as NaN, in deterministic mode."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is not written first reads as NaN, or as a place far before any tensor."""
    import torch

    def poison(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **how: Any) -> torch.Tensor:
            tensor = empty(*args, **how)
            if tensor.is_floating_point() and not tensor.requires_grad:
                tensor.fill_(float("nan"))
            elif tensor.dtype in (torch.int32, torch.int64):
                tensor.fill_(-(2**30))
            return tensor

        return made

    for owner, name in ((torch.Tensor, "new_empty"), (torch, "empty"), (torch, "empty_like")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))
