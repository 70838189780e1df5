"""Which cases of a table the default lane runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def exhaustive_but(values: Iterable[Any], *default: Any) -> list[Any]:
    """``values`` for ``parametrize``, tuples for several names: all but ``default`` run only in the exhaustive lane."""
    rows = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [value if value in default else pytest.param(*row, marks=pytest.mark.exhaustive) for value, row in rows]
