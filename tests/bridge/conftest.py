"""What the tests of Bridge share."""

from __future__ import annotations

import argparse

import pytest

from megacpp_mcore.data.prepare import prepare


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prefix of a small dataset: a module of Python itself."""
    target = tmp_path_factory.mktemp("corpus") / "text"
    (prefix,) = prepare([argparse.__file__], str(target), overwrite=True)
    return str(prefix)
