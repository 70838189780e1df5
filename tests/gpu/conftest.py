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
