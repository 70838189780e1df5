"""All patches as a set, on real Megatron: alone, together, all but one, in any order, twice; and after an edit of a target.

The checkout's half runs in a process of its own, which imports that tree.
"""

from __future__ import annotations

import importlib
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from megacpp_mcore.patches.machinery.record import NOT_MEASURED, WORDS, Patch
from megacpp_mcore.patches.machinery.registry import default
from tests import stock

NAMES = [patch.name for patch in default().patches]


@pytest.mark.parametrize("patch", default().patches, ids=NAMES)
def test_a_record_says_all_that_an_operator_has_to_judge_by(patch: Patch) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", patch.name)
    assert all(getattr(patch, name).strip() for name in WORDS)
    assert patch.gain == NOT_MEASURED or re.search(r"\d", patch.gain), "a gain is a figure"
    assert patch.edits
    assert SpecifierSet(patch.megatron_versions)
    upstream = SpecifierSet(patch.superseded_in) if patch.superseded_in else None
    for one in patch.edits:
        assert re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", one.target)
        assert one.fingerprints
        assert all(re.fullmatch(r"[0-9a-f]{64}", sha256) for sha256 in one.fingerprints.values())
        assert not (upstream and any(version in upstream for version in one.fingerprints))


def holders() -> dict[tuple[str, str], int]:
    """The identity of everything that a module of Megatron, or a class in one, holds under a name."""
    found: dict[tuple[str, str], int] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "megatron" or module is None:
            continue
        for attribute, value in list(vars(module).items()):
            found[name, attribute] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                found |= {(f"{name}.{attribute}", inner): id(held) for inner, held in vars(value).items()}
    return found


def changed(before: dict[tuple[str, str], int]) -> set[tuple[str, str]]:
    after = holders()
    # What a class or module gained meanwhile by itself (caches) is nobody's patch.
    return {place for place, identity in before.items() if after.get(place) != identity}


def go_round(subsets: Sequence[Sequence[str]]) -> None:
    """Each subset applied, applied again, verified, and reverted to identity in some order."""
    registry = default()
    for patch in registry.patches:
        for module in patch.modules:
            importlib.import_module(module)
    order, before = random.Random(7), holders()
    for subset in subsets:
        assert set(registry.apply(subset).applied) == set(subset)
        assert registry.apply(subset).applied == ()
        registry.verify()
        assert len(changed(before)) >= len(subset), subset
        for name in order.sample(subset, len(subset)):
            assert registry.revert([name]) == (name,)
        assert changed(before) == set(), subset


ALONE = [[name] for name in NAMES]
ALL_BUT_ONE = [[other for other in NAMES if other != name] for name in NAMES]


@pytest.mark.parametrize("tree", ["wheel", "checkout"])
def test_all_together(tree: str, request: pytest.FixtureRequest) -> None:
    if tree == "wheel":
        go_round([NAMES])
    else:
        assert go_round_in(request.getfixturevalue("megatron_lm"), "[NAMES]") == "0.19.1"


def go_round_in(first: Path | None, subsets: str) -> str:
    """The version of the Megatron that a Python of its own went round on."""
    code = f"import json; from tests.patches.test_set import *; go_round({subsets}); "
    code += "from megacpp_mcore.patches.machinery.registry import megatron_core_version as version; "
    return str(stock.printed(code + "print(json.dumps(version()))", first=first))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("tree", ["wheel", "checkout"])
def test_alone_and_all_but_one(tree: str, request: pytest.FixtureRequest) -> None:
    first = request.getfixturevalue("megatron_lm") if tree == "checkout" else None
    assert go_round_in(first, "[*ALONE, *ALL_BUT_ONE]") == {"wheel": "0.19.2", "checkout": "0.19.1"}[tree]
