"""The run's page: whole, self-contained, and its figures those it was given."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from megacpp_mcore.model import preset
from megacpp_mcore.observe.run_page import Run, render
from megacpp_mcore.observe.steps import Step

MODEL = preset("nam56r_tiny")
VOID = {"meta", "br", "hr", "img", "link"}


def make_run(**changes: object) -> Run:
    steps = [
        Step(
            number, 0, float(number), 2048 * number, {"lm loss": 6 / number, "mtp_1 loss": 7 / number}, 1.0, 1e-3, False
        )
        for number in range(1, 21)
    ]
    values = {
        "model": MODEL,
        "steps": steps,
        "killed_after": 11,
        "resumed_at": 10,
        "repeat": "EQUAL: steps 11 to 11 agree.",
        "device": "the CPU <two & a half cores>",
        "tokens_per_second": 1234.4,
        "bits_per_byte": 3.0,
        "unigram_bits_per_byte": 4.5,
        "heldout_bytes": 704662,
        "versions": {"torch": "2.11.0"},
    }
    return Run(**{**values, **changes})  # type: ignore[arg-type]


class Checker(HTMLParser):
    """Collects text and attributes, and fails on a tag that is not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def check(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker


def drawing(page: str) -> ElementTree.Element:
    found = re.search(r"<svg.*?</svg>", page, re.DOTALL)
    assert found is not None
    return ElementTree.fromstring(found[0])


def test_the_page_is_whole_and_needs_no_network() -> None:
    page = render(make_run())
    checker = check(page)
    assert "http" not in page
    assert "<script" not in page
    assert not {name for name, _ in checker.attributes} & {"src", "href", "srcset"}
    assert "url(" not in page
    assert "@import" not in page
    assert ("name", "viewport") in checker.attributes
    assert "prefers-color-scheme: dark" in page
    assert len(page) < 40_000


def test_the_figures_are_those_it_was_given() -> None:
    text = check(render(make_run())).text
    for expected in (
        "3.000",
        "4.500",
        "33.3 %",
        "under the unigram",
        "704,662 bytes",
        "1,234",
        "2.11.0",
        "EQUAL: steps",
    ):
        assert expected in text
    assert "the CPU <two & a half cores>" in text
    assert f"{sum(MODEL.parameters().values()):,}" in text
    for letter in "AEMR":
        assert f"{MODEL.parameters()[letter]:,}" in text
    over = check(render(make_run(bits_per_byte=9.0))).text
    assert "100.0 %over the unigram" in over


def test_the_curves_go_through_every_step() -> None:
    svg = drawing(render(make_run()))
    curves = [element for element in svg if element.tag == "polyline"]
    assert len(curves) == 2
    points = [[tuple(map(float, pair.split(","))) for pair in curve.attrib["points"].split()] for curve in curves]
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    for curve in points:
        assert len(curve) == 20
        assert [x for x, _ in curve] == sorted(x for x, _ in curve)
        assert [y for _, y in curve] == sorted(y for _, y in curve)  # a falling loss goes down the page
        assert all(0 <= x <= width and 0 <= y <= height for x, y in curve)
    assert all(y_mtp < y_lm for (_, y_lm), (_, y_mtp) in zip(*points, strict=True))
    texts = [element.text for element in svg if element.tag == "text"]
    assert "resumed at 10" in texts
    assert "killed" in texts
    marks = [float(element.attrib["x1"]) for element in svg if element.attrib.get("class") == "mark"]
    assert marks == [points[0][9][0], points[0][10][0]]


def test_a_loss_that_is_no_number_is_left_out() -> None:
    run = make_run()
    broken = replace(run.steps[4], losses={"lm loss": math.nan, "mtp_1 loss": math.inf})
    svg = drawing(render(replace(run, steps=[*run.steps[:4], broken, *run.steps[5:]])))
    assert [len(e.attrib["points"].split()) for e in svg if e.tag == "polyline"] == [19, 19]
    assert "nan" not in ElementTree.tostring(svg, encoding="unicode")


@pytest.mark.parametrize("names", [("lm loss",), ()])
def test_a_run_without_some_losses(names: tuple[str, ...]) -> None:
    run = make_run()
    steps = [replace(step, losses={name: step.losses[name] for name in names}) for step in run.steps]
    page = render(replace(run, steps=steps))
    check(page)
    assert len([element for element in drawing(page) if element.tag == "polyline"]) == len(names)


@pytest.mark.parametrize(("worst", "labels"), [(6.0, range(7)), (1e5, range(0, 105001, 13125))])
def test_there_are_few_gridlines_however_high_a_loss(worst: float, labels: range) -> None:
    run = make_run()
    run.steps[3].losses["lm loss"] = worst  # type: ignore[index]
    page = render(run)
    assert len(page) < 20_000
    found = re.findall(r'text-anchor="end">(\d+)</text>', page)
    assert [int(text) for text in found][: len(labels)] == list(labels)
