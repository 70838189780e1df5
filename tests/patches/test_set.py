"""All patches as a set, on real Megatron: alone, together, all but one, in any order, twice, each back to identity."""

from __future__ import annotations

import importlib
import itertools
import random
import sys
from collections.abc import Sequence

import pytest

from megacpp_mcore.patches.machinery.registry import default
from megacpp_mcore.patches.machinery.source_tree import SourceTree
from tests import stock
from tests.lanes import exhaustive_but
from tests.trees import wheel_root

NAMES = [patch.name for patch in default().patches]


def holders() -> dict[tuple[str, str], int]:
    """The identity of everything that a module of Megatron, or a class in one, holds under a name."""
    identities: dict[tuple[str, str], int] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "megatron" or module is None:
            continue
        for attribute, value in list(vars(module).items()):
            identities[name, attribute] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                identities |= {(f"{name}.{attribute}", inner): id(held) for inner, held in vars(value).items()}
    return identities


def changed(before: dict[tuple[str, str], int]) -> set[tuple[str, str]]:
    after = holders()
    # What a class or module gained meanwhile by itself (caches) is not a patch.
    return {place for place, identity in before.items() if after.get(place) != identity}


def go_round(subsets: Sequence[Sequence[str]]) -> None:
    """Each subset applied, applied again, verified, and reverted to identity in some order."""
    registry = default()
    for patch in registry.patches:
        for module in patch.modules:
            importlib.import_module(module)
    order, before = random.Random(7), holders()
    for subset in subsets:
        assert set(registry.apply(subset)) == set(subset)
        assert registry.apply(subset) == ()
        registry.verify()
        assert len(changed(before)) >= len(subset), subset
        for name in order.sample(subset, len(subset)):
            assert registry.revert([name]) == (name,)
        assert changed(before) == set(), subset


DRAW = random.Random(3)
SUBSETS = {
    "together": [NAMES],
    "alone and all but one": [[name] for name in NAMES] + [[other for other in NAMES if other != name] for name in NAMES],
    "drawn": [DRAW.sample(NAMES, DRAW.randint(2, len(NAMES) - 2)) for _ in range(131 - 2 * len(NAMES))],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tree", "subsets"), exhaustive_but(itertools.product(("wheel", "checkout"), SUBSETS), ("wheel", "together"))
)
def test_every_patch_goes_in_and_out(tree: str, subsets: str, request: pytest.FixtureRequest) -> None:
    """In a Python of its own, which imports that tree."""
    first = request.getfixturevalue("megatron_lm") if tree == "checkout" else None
    code = f"import json; from tests.patches.test_set import *; go_round(SUBSETS[{subsets!r}]); "
    version = stock.printed(code + "print(json.dumps(default().version))", first=first, timeout=1200)
    assert version == SourceTree((first or wheel_root(),)).version()
