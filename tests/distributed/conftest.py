"""The fixture that most of the layout tests share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.distributed.runs import Laboratory


@pytest.fixture(scope="module")
def laboratory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    """The runs that the tests of a module share, as its LABORATORY makes them; their checkpoints are removed in the end."""
    folder = tmp_path_factory.mktemp("laboratory")
    yield getattr(request.module, "LABORATORY", Laboratory)(folder)
    shutil.rmtree(folder)
