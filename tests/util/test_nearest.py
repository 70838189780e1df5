"""Suggestions for unknown names."""

from __future__ import annotations

import pytest

from megacpp_mcore.util.nearest import suggestion


@pytest.mark.parametrize("choices", ["'recipe', 'report'", "recipe, report"])  # Python 3.12.1, and later ones
def test_a_choice_is_suggested_however_argparse_writes_them(choices: str) -> None:
    message = f"argument COMMAND: invalid choice: 'recpie' (choose from {choices})"
    assert suggestion(message, []) == "did you mean 'recipe'? "
    assert suggestion(message.replace("recpie", "zzz"), []) == ""
