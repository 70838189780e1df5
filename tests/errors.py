"""What an error says by other things than its sentence: its class, its code, and the values that it names."""

from __future__ import annotations

import re

import pytest

from megacpp_mcore.errors import MegacppError


def raises[Error: MegacppError](error: type[Error], *values: object, code: str = "") -> pytest.RaisesExc[Error]:
    """Expect an `error` of just this class and `code`, whose message names each of `values`, as whole words."""

    def check(raised: Error) -> bool:
        assert (type(raised), raised.code) == (error, code), f"expected {error.__name__}, {code!r}: {raised!r}"
        for value in map(str, values):
            start, end = (r"\b" if re.match(r"\w", edge) else "" for edge in (value[0], value[-1]))
            assert re.search(start + re.escape(value) + end, str(raised)), f"{value!r} is not named: {raised}"
        return True

    return pytest.raises(error, check=check)
