"""One laboratory for all layout tests, so that a run is made once (their xdist_group keeps them on one worker)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.distributed.runs import Laboratory


@pytest.fixture(scope="session")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    """The runs that these tests share; their checkpoints are removed in the end."""
    folder = tmp_path_factory.mktemp("laboratory")
    yield Laboratory(folder)
    shutil.rmtree(folder)
