"""One laboratory for all layout tests, so that a run is made once; all of them on one xdist worker."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.runs import Laboratory

_HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    """The runs that these tests share; their checkpoints are removed in the end."""
    folder = tmp_path_factory.mktemp("laboratory")
    yield Laboratory(folder)
    shutil.rmtree(folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of this folder together under ``--dist loadgroup``."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("distributed"))
