"""What several unit tests build Megatron's models in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit import stock


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The CPU lane and Megatron's process groups for the tests of a module, and a folder for what they write."""
    folder = tmp_path_factory.mktemp("process")
    with stock.one_process(folder / "store"):
        yield folder
