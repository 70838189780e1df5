"""What the tests on a GPU share: a text to train on, and Megatron's process groups."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prefix of the corpus of Python's standard library."""
    from tests.gpu.runs import PYTHON, ROOT  # brings torch

    folder = tmp_path_factory.mktemp("corpus")
    command = [*PYTHON, "megacpp_mcore", "data", "corpus", "--output", str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    return str(folder / "stdlib_train")


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Megatron's process groups for the tests of a module, on the GPU."""
    import torch

    from tests.gpu.runs import process_groups

    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("process") / "store"), 1)
    with process_groups(0, store=store, rank=0, world_size=1):
        yield


@pytest.fixture
def nan_before_written() -> Iterator[None]:
    """Memory that is not written first reads as NaN."""
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def nan_in_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of what ``new_empty`` makes, whatever algorithms are asked for."""
    import torch

    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **how: new_empty(*args, **how).fill_(float("nan")))
