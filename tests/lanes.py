"""Which cases of a table the default lane runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def exhaustive_but(values: Iterable[Any], *default: Any) -> list[Any]:
    """``values`` for ``parametrize``: all but ``default`` are run with the exhaustive tests alone."""
    return [value if value in default else pytest.param(value, marks=pytest.mark.exhaustive) for value in values]
