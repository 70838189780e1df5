"""What the tests of layers share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.model import preset
from tests import stock


@pytest.fixture
def config(process: Path) -> Any:
    """The TransformerConfig of nam56r_tiny, for a test to change."""
    return stock.model_config(stock.words(preset("nam56r_tiny"))).transformer
