"""The pattern grammar: round trips, refusals that say where, tiling, DSA placement, pipeline chunks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacpp_mcore.errors import ModelError, PatternError
from megacpp_mcore.model.pattern import (
    attention_roles,
    check_chunks,
    parse,
    promoted_schedule,
    source_layers,
    uniform_chunks,
)
from tests.errors import raises

NAM56R = "AEMEAEMEAEMR"

letters = st.text(alphabet="AMER", min_size=1, max_size=14)
legal = st.builds(
    lambda stages, mtp: "|".join(stages) + "".join("/" + part for part in mtp),
    st.lists(letters, min_size=1, max_size=4),
    st.lists(letters, max_size=3),
)


@pytest.fixture(scope="module")
def layers() -> str:
    return parse(NAM56R).layers(52)


@pytest.fixture(scope="module")
def roles(layers: str) -> tuple[str | None, ...]:
    return attention_roles(layers, "-FSS")


@settings(max_examples=50)
@given(legal | st.text(alphabet="AMER|/ax", max_size=12))
def test_every_text_parses_and_prints_again_or_is_refused(text: str) -> None:
    parts = text.split("/")
    is_legal = bool(text) and all(
        stage and set(stage) <= set("AMER") for stage in parts[0].split("|") + [p.replace("|", "?") for p in parts[1:]]
    )
    if is_legal:
        assert str(parse(text)) == text
    else:
        with pytest.raises(PatternError, match=r"position \d+|empty"):
            parse(text)


@pytest.mark.parametrize(
    ("text", "character", "position", "says"),
    [
        ("|AE", "|", 1, "closes"),
        ("AE||M", "|", 4, "closes"),
        ("AE|", "|", 3, "opens"),
        ("/A", "/", 1, "closes"),
        ("AE/", "/", 3, "opens"),
        ("AE//A", "/", 4, "closes"),
        ("AE|/A", "/", 4, "closes"),
        ("AE/A|E", "|", 5, "MTP"),
        ("AeM", "e", 2, "not known"),
        ("A E", " ", 2, "not known"),
        ("AE\n", "\n", 3, "not known"),
    ],
)
def test_refusals(text: str, character: str, position: int, says: str) -> None:
    with raises(PatternError, f"character {character!r} at position {position}", says):
        parse(text)


@given(st.lists(letters, min_size=2, max_size=4), st.integers(1, 60))
def test_stage_marks_turn_tiling_off(stages: list[str], depth: int) -> None:
    staged, text = parse("|".join(stages)), "".join(stages)
    assert staged.staged
    assert staged.layers(len(text)) == text
    if depth != len(text):
        with raises(PatternError, f"{len(text)} layers", depth):
            staged.layers(depth)


def test_dsa_and_index_cache_of_nam56r(roles: tuple[str | None, ...]) -> None:
    numbers = {role: [i for i, assigned in enumerate(roles, 1) if assigned == role] for role in "-FS"}
    assert numbers == {"-": [1, 17, 33, 49], "F": [5, 21, 37], "S": [9, 13, 25, 29, 41, 45]}
    assert source_layers(roles) == {9: 5, 13: 5, 25: 21, 29: 21, 41: 37, 45: 37}


@pytest.mark.parametrize(("schedule", "layer"), [("S", 1), ("-S", 5), ("--SF", 9)])
def test_a_shared_layer_needs_a_full_one_below(schedule: str, layer: int) -> None:
    with raises(PatternError, f"layer {layer}", "('F')"):
        attention_roles(parse(NAM56R).layers(52), schedule)
    with raises(PatternError, "layer 2", "Shared"):
        source_layers((None, "S"))


def test_schedules_that_do_not_fit() -> None:
    with raises(PatternError, "empty"):
        attention_roles("AA", "")
    with raises(PatternError, "3 entries", "2 A"):
        attention_roles("AEA", "-FS")
    assert attention_roles("EMER", "-FS") == (None,) * 4


@given(st.text(alphabet="AMER", min_size=1, max_size=30), st.text(alphabet="-FS", min_size=1, max_size=8))
def test_roles_follow_the_tiled_schedule_or_are_refused(text: str, schedule: str) -> None:
    count = text.count("A")
    tiled = "".join(schedule[i % len(schedule)] for i in range(count))
    first_sparse = tiled.lstrip("-")[:1]
    if count and (len(schedule) > count or first_sparse == "S"):
        with pytest.raises(PatternError):
            attention_roles(text, schedule)
        return
    assigned = attention_roles(text, schedule)
    assert [role for role in assigned if role is not None] == list(tiled)
    assert [letter == "A" for letter in text] == [role is not None for role in assigned]


@pytest.mark.parametrize(
    ("pipeline", "virtual", "promoted"),
    [(1, 1, ()), (2, 1, (29,)), (4, 1, (29, 41)), (2, 2, (29, 41)), (13, 1, (9, 13, 25, 29, 41, 45))],
)
def test_promotion_for_pipeline_layouts(
    roles: tuple[str | None, ...], pipeline: int, virtual: int, promoted: tuple[int, ...]
) -> None:
    chunks = uniform_chunks(52, pipeline, virtual)
    schedule, moved = promoted_schedule(roles, chunks)
    assert moved == promoted
    expected = ["F" if number in promoted else role for number, role in enumerate(roles, 1) if role]
    assert schedule == "".join(expected)
    if not promoted:
        check_chunks("nam56r", roles, chunks)
        return
    with raises(ModelError, ", ".join(map(str, promoted)), repr(schedule)):
        check_chunks("nam56r", roles, chunks)
    adopted = attention_roles(parse(NAM56R).layers(52), schedule)
    check_chunks("nam56r", adopted, chunks)
    assert all(any(full in chunk and shared in chunk for chunk in chunks) for shared, full in source_layers(adopted).items())


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 60))
def test_uniform_chunks_cover_every_layer_once(pipeline: int, virtual: int, depth: int) -> None:
    if depth % (pipeline * virtual):
        with raises(ModelError, f"{depth} layers", pipeline, virtual):
            uniform_chunks(depth, pipeline, virtual)
        return
    chunks = uniform_chunks(depth, pipeline, virtual)
    assert [number for chunk in chunks for number in chunk] == list(range(1, depth + 1))
    assert {len(chunk) for chunk in chunks} == {depth // (pipeline * virtual)}
