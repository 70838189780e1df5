"""The check of values from outside: kinds by annotation, and what is said of a value that is of another one."""

from __future__ import annotations

from typing import Any

import pytest

from megacpp_mcore.util import schema


@pytest.mark.parametrize(
    ("kind", "value", "as_read"),
    [
        (float, 3, 3.0),
        (int | float, 3, 3),
        (float | None, None, None),
    ],
)
def test_a_value_is_read_as_its_kind_has_it(kind: Any, value: Any, as_read: Any) -> None:
    found = schema.check(value, kind)
    assert found is value or found == (value if as_read is None else as_read)
    assert type(found) is type(value if as_read is None else as_read)


@pytest.mark.parametrize(
    ("kind", "value", "named"),
    [
        (int, True, "a whole number"),
        (int | None, "3", "a whole number or none"),
        (float, "3", "a number"),
    ],
)
def test_what_is_of_another_kind_is_named_with_its_place(kind: Any, value: Any, named: str) -> None:
    with pytest.raises(schema.SchemaError, match=rf"^it is {value!r} \({type(value).__name__}\); .*{named}$"):
        schema.check(value, kind)
