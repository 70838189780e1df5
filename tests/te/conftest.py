"""What the tests of Transformer Engine share: settings that end with a test, and an engine that is said to be there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from megacpp_mcore.util import te_imports
from megacpp_mcore.util.probe import ProbeResult


@pytest.fixture
def configure() -> Iterator[Callable[..., None]]:
    """Turns features on or off, as the key ``transformer_engine`` of a file does."""
    yield lambda **features: te_imports.configure(te_imports.Features(**features), "a file")
    te_imports.configure(None)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that Transformer Engine is installed."""
    monkeypatch.setattr(te_imports, "_installed", lambda: ProbeResult(True))
