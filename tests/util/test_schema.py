"""The check of values from outside: kinds by annotation, and what is said of a value that is of another one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from megacpp_mcore.util import schema


@dataclass(frozen=True)
class Point:
    x: float
    names: Sequence[str] = ()


@pytest.mark.parametrize(
    ("kind", "value", "as_read"),
    [
        (float, 3, 3.0),
        (int | float, 3, 3),
        (float | None, None, None),
        (Point, {"x": 3, "names": ["a"]}, Point(3.0, ["a"])),
        (Point | None, {"x": 0.5}, Point(0.5)),
        (Mapping[str, Point], {"a": {"x": 1}}, {"a": Point(1.0)}),
        (Any, math.nan, math.nan),
    ],
)
def test_a_value_is_read_as_its_kind_has_it(kind: Any, value: Any, as_read: Any) -> None:
    found = schema.check(value, kind)
    assert found is value or found == (value if as_read is None else as_read)
    assert type(found) is type(value if as_read is None else as_read)


@pytest.mark.parametrize(
    ("kind", "value", "named"),
    [
        (int, True, "it is True (bool); expected a whole number"),
        (int | None, "3", "it is '3' (str); expected a whole number or none"),
        (float, "3", "it is '3' (str); expected a number"),
        (Mapping[str, Sequence[int]], {"a": [1, "x"]}, "it[a][1] is 'x' (str); expected a whole number"),
        (Point, {"x": 1, "z": 2}, "it: unknown key 'z'; known: x, names"),
        (Point | None, {"names": []}, "it has not x"),
    ],
)
def test_what_is_of_another_kind_is_named_with_its_place(kind: Any, value: Any, named: str) -> None:
    with pytest.raises(schema.SchemaError, match=f"^{re.escape(named)}"):
        schema.check(value, kind)
