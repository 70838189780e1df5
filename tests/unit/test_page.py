"""The page about runs: of real ones, in a real browser; and that what files say cannot break it."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import goodput, page, receipts, report_command
from megacpp_mcore.observe.page import charts as page_charts
from megacpp_mcore.observe.page import data as page_data
from megacpp_mcore.observe.page import parts as page_parts
from megacpp_mcore.observe.page.charts import Axis, Band, Curve, axis_of, plot
from megacpp_mcore.observe.page.data import read
from megacpp_mcore.observe.page.style import KINDS
from megacpp_mcore.observe.receipts.schema import flatten
from megacpp_mcore.observe.steps import Step
from tests.unit import browser, page_run, tiny_run

STEPS = 8
RECEIPTS = tiny_run.ROOT / "examples" / "receipts"
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ][\d:]+(\+00:00)?")
"""When a receipt was put together."""
VOID = {"meta", "br", "hr", "img", "link"}
PARTS = (
    "figures",
    "loss",
    "loss-plot",
    "time",
    "time-plot",
    "goodput",
    "goodput-bar",
    "shares",
    "memory",
    "backends",
    "by-step",
)
"""What every page of a run has, by its ``data-part``."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run that was killed in step 4 and went on from step 3 with a fall-back, profiled; and a plain one."""
    folder = tmp_path_factory.mktemp("page")
    data = tiny_run.make_data(folder)
    killed, plain = folder / "killed", folder / "plain"
    save: tuple[str, ...] = ("--save", str(folder / "saved"), "--save-interval", "3", "--ckpt-format", "torch_dist")
    save += ("--eval-interval", "5", "--eval-iters", "1")
    page_run.train(data, killed, STEPS, *save, fate="kill")
    time.sleep(0.5)
    page_run.train(data, killed, STEPS, *save, "--load", str(folder / "saved"), fate="fall-back profile")
    page_run.train(data, plain, 5)
    return killed, plain


@dataclass
class Row:
    """A row of a table in a part of the page; ``off``: its class says that it is not as asked for."""

    part: str
    off: bool
    cells: list[str]


class Reader(HTMLParser):
    """Collects text, attributes and tables' rows, and fails on a tag that is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str | None]] = []
        self.rows: list[Row] = []
        self._parts: list[str] = [""]
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag in VOID:
            return
        self.open.append(tag)
        found = dict(attrs)
        self._parts.append(found.get("data-part") or self._parts[-1])
        if tag == "tr":
            self.rows.append(Row(self._parts[-1], "off" in (found.get("class") or "").split(), []))
        elif tag == "td":
            self.rows[-1].cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._parts.pop()

    def handle_data(self, data: str) -> None:
        self.text += data
        if "td" in self.open:
            self.rows[-1].cells[-1] += data

    def parts(self) -> set[str]:
        return {value for name, value in self.attributes if name == "data-part" and value is not None}


def check_self_contained(text: str) -> Reader:
    """Nothing in the page can be fetched, and nothing can run."""
    found = Reader(text)
    assert not {name for name, _ in found.attributes} & {"src", "href", "srcset", "data", "action", "onload", "onclick"}
    for word in ("http:", "https:", "<script", "url(", "@import", "//"):
        assert word not in text, word
    assert "default-src 'none'" in text
    assert ("name", "viewport") in found.attributes
    return found


def backend_rows(found: Reader) -> list[Row]:
    """The rows about backends: op or part, layers, requested, observed, why."""
    return [row for row in found.rows if row.part == "backends" and row.cells]


# --- Real runs --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_page_of_a_killed_run_with_a_fall_back(runs: tuple[Path, Path]) -> None:
    killed, _ = runs
    found = check_self_contained(page.html([killed]))
    assert set(PARTS) | {"disqualifiers", "receipts"} <= found.parts()
    receipt = receipts.read(killed)
    for expected in (
        "Do not use this run's speed",
        "fall-back: op mamba3 in layers 3, 7, 11",
        "head_dim 16 is not a multiple of 1024",
        "slower: reference",
        "resumed at 3",
        "restarted from step 3",
        "self CPU time of operators of steps 5 to 6",
        f"{receipt['throughput']['tokens_per_s']:,.0f}tokens/s",
        f"{100 * receipt['goodput']['goodput']:.1f} %goodput",
        *map(page_parts.class_label, page_parts.CLASS_WORDS),
    ):
        assert expected in found.text, expected


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_timeline_is_the_goodput(runs: tuple[Path, Path]) -> None:
    """The bands sum, class by class, to what the bar shows; and the rates are of all steps that ran."""
    for run in runs:
        data = read(run)
        line, found = data.timeline, data.ranks[0]
        assert line is not None
        assert line.wall_s == pytest.approx(found.wall_ns / 1e9, abs=1e-3)
        for kind, spent in found.nanoseconds.items():
            drawn = sum(span.end_s - span.begin_s for span in line.spans if span.kind == kind)
            assert drawn == pytest.approx(spent / 1e9, abs=1e-3), kind
        assert [rate.step for rate in line.rates] == [step.step for step in data.steps]
    (restart,) = read(runs[0]).timeline.restarts  # type: ignore[union-attr]
    assert restart[1] == 3
    assert found.nanoseconds["lost_steps"] == 0 < read(runs[0]).ranks[0].nanoseconds["lost_steps"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_runs_side_by_side(runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    report_command.add_parser(parser.add_subparsers(dest="command"))
    output = tmp_path / "out.html"
    words = ["report", "html", str(runs[1]), str(runs[0]), "--output", str(output)]
    assert report_command.run(parser.parse_args(words)) == 0
    assert str(output) in capsys.readouterr().out
    text = output.read_text(encoding="utf-8")
    again = page.html([runs[1], runs[0]])
    assert _TIME.sub("", text) == _TIME.sub("", again)
    found = check_self_contained(text)
    assert {"overlay", "comparison", "receipts", "disqualifiers"} <= found.parts()
    assert "May killed be compared with plain?" in found.text
    assert re.search(r"B is killed; step times: A median .* s.*; B median .* s.*; floor \S+ %", found.text)
    assert "B is disqualified by fall-back" in found.text
    assert "no claim" in found.text
    assert text.count('data-part="loss-plot"') == 2
    assert re.search(r'<tr><th class="wide">model</th>', text)
    assert re.search(r'<tr class="differs"><th class="wide">disqualifiers</th>', text)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_receipt_alone(runs: tuple[Path, Path]) -> None:
    found = check_self_contained(page.html([runs[0] / "receipt.json"]))
    assert found.text.count("only the receipt is here") == 4
    assert "fall-back: op mamba3" in found.text
    assert {"backends", "shares", "memory", "disqualifiers"} <= found.parts()


# --- In a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    program = browser.find()
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(browser.NAMES)} is on PATH; {browser.VARIABLE} may name one")
    with browser.running(program) as found:
        yield found


BOXES = """Object.fromEntries([...document.querySelectorAll('[data-part]')].map(
  e => [e.dataset.part, (b => [b.x + scrollX, b.y + scrollY, b.width, b.height])(e.getBoundingClientRect())]))"""


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_part_is_painted(
    chromium: browser.Browser, runs: tuple[Path, Path], tmp_path: Path, width: int, dark: bool
) -> None:
    """Every part has its own room in the window and something in it; nothing is fetched, nothing complains."""
    file = tmp_path / "page.html"
    file.write_text(page.html([runs[0]]), encoding="utf-8")
    chromium.show(file, width, dark=dark)
    assert chromium.errors == []
    assert chromium.requests == [file.as_uri()]
    assert chromium.ask("document.documentElement.scrollWidth") == width == chromium.ask("innerWidth")

    boxes = chromium.ask(BOXES)
    assert set(PARTS) | {"disqualifiers"} <= boxes.keys()
    for name, (left, _, wide, high) in boxes.items():
        assert left >= 0, name
        assert left + wide <= width, name
        assert min(wide, high) >= (60 if name.startswith("by-step") else 18), (name, wide, high)
    sticking_out = chromium.ask(
        "[...document.querySelectorAll('body *')].filter(e => e.getClientRects().length && "
        "(e.getBoundingClientRect().right > innerWidth + 1 || e.getBoundingClientRect().left < -1))"
        ".map(e => e.outerHTML.slice(0, 80))"
    )
    assert sticking_out == []

    colours = chromium.colours(chromium.screenshot(), boxes)
    for name, counts in colours.items():
        assert len(counts) >= 4, (name, "is blank")
    check_colours(chromium, colours, boxes)
    paper = chromium.ask("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(19, 21, 24)") == dark


def check_colours(chromium: browser.Browser, colours: dict[str, dict[str, int]], boxes: dict[str, list[float]]) -> None:
    """The colours that mean something are really there, each in about the room that its share gives it."""

    def of(name: str) -> str:
        drawn = chromium.ask(
            f"(e => (e.style.color = 'var(--{name})', document.body.append(e), getComputedStyle(e).color))"
            "(document.createElement('i'))"
        )
        return ",".join(re.findall(r"\d+", drawn)[:3])

    for curve, part in (
        ("c1", "loss-plot"),
        ("c2", "loss-plot"),
        ("c1", "time-plot"),
        ("c1", "memory"),
        ("c2", "shares"),
    ):
        assert colours[part].get(of(curve), 0) > 20, (curve, part)
    assert colours["disqualifiers"].get(of("bad"), 0) > 100
    assert colours["backends"].get(of("bad-soft"), 0) > 500
    bar = chromium.ask("(b => b.width * b.height)(document.querySelector('.bar.tall').getBoundingClientRect())")
    shown = chromium.ask(
        "Object.fromEntries([...document.querySelectorAll('.bar.tall i')].map(e => [e.className, "
        "e.getBoundingClientRect().width / e.parentElement.getBoundingClientRect().width]))"
    )
    for kind in ("productive", "startup", "recovery", "lost_steps"):
        assert colours["goodput-bar"].get(of(kind), 0) == pytest.approx(shown[kind] * bar, rel=0.25, abs=120), kind


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_runs_fit_on_a_phone(chromium: browser.Browser, runs: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "two.html"
    file.write_text(page.html(runs), encoding="utf-8")
    for width in (390, 1280):
        chromium.show(file, width)
        assert (chromium.errors, chromium.requests) == ([], [file.as_uri()])
        assert chromium.ask("document.documentElement.scrollWidth") == width
        first, second = chromium.ask(
            "[...document.querySelectorAll('.side tbody tr:nth-child(2) td')].map(e => e.getBoundingClientRect().toJSON())"
        )
        assert first["right"] <= second["left"]  # side by side on a phone, too
        assert abs(first["top"] - second["top"]) < 2
        assert len(chromium.colours(chromium.screenshot(), {"overlay": chromium.ask(BOXES)["overlay"]})["overlay"]) > 4


# --- What files say ---------------------------------------------------------------------------------------------------


NASTY = "</style><script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


def poisoned(value: Any) -> Any:
    """Every text of a receipt with markup behind it, and every key of a map that is free."""
    if isinstance(value, str):
        return value + NASTY
    if isinstance(value, list):
        return [poisoned(each) for each in value]
    if isinstance(value, dict):
        return {key: poisoned(each) for key, each in value.items()}
    return value


@pytest.mark.slow
@pytest.mark.exhaustive
def test_markup_in_the_files_of_a_run_is_text(
    runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = read(runs[0])
    assert_markup_is_text(data, data.steps, tmp_path, monkeypatch)


def test_markup_in_a_receipt_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [
        Step(number, 0, 1.0, 8 * number, {"lm loss": 3.0, "mtp_1 loss": 3.0}, 1.0, 1e-3, False) for number in (1, 2)
    ]
    assert_markup_is_text(read(RECEIPTS / "nam56r_quarter_h200_bf16.json"), steps, tmp_path, monkeypatch)


def assert_markup_is_text(
    data: page_data.RunData, recorded: Sequence[Step], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail if a text of the receipt, a name of a loss, a reason or the folder's name comes through as markup."""
    fresh = tmp_path / "<b>run & co"
    fresh.mkdir()
    nasty = poisoned(copy.deepcopy(data.receipt))
    groups = data.receipt["shares"]["groups"] or {}
    nasty["shares"]["groups"] = {name + NASTY: share for name, share in groups.items()}
    steps = [
        dataclasses.replace(
            step, losses={name + NASTY * (name != "lm loss"): value for name, value in step.losses.items()}
        )
        for step in recorded
    ]
    bad = page_data.RunData(
        "<b>run", nasty, flatten(nasty)[0], steps, data.ranks, data.timeline, data.metrics, {"loss": NASTY}
    )
    monkeypatch.setattr(page.assembly, "read", lambda path: bad)
    for paths in ([fresh], [fresh, tmp_path]):
        text = page.html(paths)
        found = Reader(text)
        assert "<script" not in text
        assert "<img" not in text
        assert "src" not in {name for name, _ in found.attributes}
        assert NASTY in found.text
    assert "<b>run &amp; co" not in text


def test_there_is_something_to_show(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 runs for one page; expected 1 to 6"):
        page.html([])
    with pytest.raises(DataError, match="expected a receipt, or the folder of a run that was observed"):
        page.html([tmp_path])


# --- What is left of a run, and said of several ------------------------------------------------------------------------


def run_of(folder: Path) -> Path:
    """A run's folder, as small as it can be: five seconds of a start, three of them a step."""
    (folder / "parts").mkdir(parents=True)
    (folder / "goodput").mkdir()
    part = {"schema": 1, "rank": 0, "status": "running", "warm_up_steps": 3, "notes": []}
    (folder / "parts" / "rank_00000.json").write_text(json.dumps(part))
    began = 1_700_000_000_000_000_000  # 2023-11-14, 22:13:20 UTC
    lines: list[dict[str, Any]] = [
        {"began": began, "host": "a", "pid": 1},
        {"at": began + 4 * 10**9, "phases": {"startup": 10**9, "step": 3 * 10**9}, "step": 1, "resumed_at": 0},
        {"at": began + 5 * 10**9, "phases": {"idle": 10**9}, "how": "finished"},
    ]
    (folder / "goodput" / "rank_00000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize(
    ("file", "part"), [("metrics.jsonl", "by-step"), ("steps.jsonl", "loss"), ("goodput/rank_00000.jsonl", "goodput")]
)
def test_a_damaged_file_leaves_the_other_parts(tmp_path: Path, file: str, part: str) -> None:
    run = run_of(tmp_path)
    whole = check_self_contained(page.html([run]))
    assert "no step was logged to metrics.jsonl" in whole.text
    (run / file).write_text('{"bad": 1}\n{"bad": 2}\n')
    text = page.html([run])
    found = check_self_contained(text)
    (box,) = re.findall(rf'<section data-part="{part}">.*?</section>', text)
    assert re.search(rf"Not here: \S+{re.escape(file)}, line 1", box)
    assert found.parts() == whole.parts() - ({"goodput-bar", "time-plot"} if part == "goodput" else set())


def test_a_page_says_why_logged_steps_are_not_among_its_plots(tmp_path: Path) -> None:
    steps = [Step(number, 0, 1.0, 8 * number, {"lm loss": 3.0}, 1.0, 1e-3, False) for number in (1, 2)]
    data = dataclasses.replace(read(run_of(tmp_path)), steps=steps, missing={"metrics": "line 7 is <bad>"})
    text = page_parts.multiples(data)
    assert "gradient norm" in text
    assert "The logged steps are not here: line 7 is &lt;bad&gt;." in text
    assert "not here" not in page_parts.multiples(dataclasses.replace(data, missing={}))


def test_a_page_says_when_the_run_began_and_when_its_receipt_was_made(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    words = page_parts.about(read(run))
    assert "started 2023-11-14T22:13:20+00:00 · receipt put together 20" in words
    alone = page_parts.about(read(RECEIPTS / "nam56r_quarter_h200_bf16.json"))
    assert "receipt put together 20" in alone
    assert "started" not in alone


def test_classes_of_time_are_called_as_the_command_calls_them(tmp_path: Path) -> None:
    text = page_parts.goodput_bars(read(run_of(tmp_path)))
    for words in (
        "between steps [idle]",
        "lost steps (done again, or interrupted) [lost_steps]",
        "waiting for data [data]",
    ):
        assert words in text
    assert "</i>evaluation</td>" in text


# --- Charts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axis", "texts"),
    [
        (Axis(0, 10, ticks=5), ["0", "2", "4", "6", "8", "10"]),
        (Axis(1, 3, ticks=6, whole=True), ["1", "2", "3"]),
        (Axis(0.1, 0.35, ticks=3), ["0.1", "0.2", "0.3"]),
        (Axis(0, 2.4e6, ticks=3), ["0", "1M", "2M"]),
        (Axis(5, 5, ticks=3), ["4.8", "5.0", "5.2"]),
        (Axis(0.9, 2000, ticks=5, log=True), ["1", "10", "100", "1,000"]),
    ],
)
def test_ticks_are_round_and_few(axis: Axis, texts: list[str]) -> None:
    labels = list(axis.labels())
    assert [text for _, text in labels] == texts
    places = [place for place, _ in labels]
    assert places == sorted(places)
    assert 0 <= places[0] <= places[-1] <= 1000


def test_one_spike_does_not_flatten_a_curve() -> None:
    assert axis_of([4.0, 3.0, 2.0, 1e5], ticks=5).log
    assert not axis_of([4.0, 3.0, 2.0], ticks=5).log
    assert not axis_of([4.0, float("nan"), float("inf")], ticks=5).log


def test_a_long_curve_keeps_its_extremes_and_no_value_that_is_no_number() -> None:
    points = [(float(step), 5.0 + (step == 12_345) * 3 - (step == 777) * 2) for step in range(50_000)]
    points[10] = (10.0, float("nan"))
    x, y = Axis(0, 50_000, ticks=5), Axis(0, 10, ticks=5)
    text = plot("p", "s", x, y, [Curve("a", "c1", points)])
    assert len(text) < 30_000
    assert "nan" not in text
    drawn = [tuple(map(float, pair.split())) for pair in re.findall(r'd="M([^"]+)"', text)[-1].split("L")]
    assert [place for place, _ in drawn] == sorted(place for place, _ in drawn)
    assert min(height for _, height in drawn) == 200
    assert max(height for _, height in drawn) == 700


def test_what_is_left_out_is_said() -> None:
    bands = [Band(number, number + 0.1 + number / 1e6, "data", "t") for number in range(1000)]
    text = plot("p", "s", Axis(0, 1000, ticks=5), Axis(0, 1, ticks=2), [], bands=bands)
    assert text.count('<rect class="band') == 300
    assert "700 shorter stretches are not drawn" in text


def test_every_class_of_time_has_a_colour_and_a_word() -> None:
    assert tuple(page_parts.CLASS_WORDS) == goodput.CLASSES
    assert set(KINDS) == set(goodput.CLASSES)


def test_layers_as_ranges() -> None:
    assert page_parts.spans([3, 1, 2, 7, "mtp", 9, 10]) == "1–3, 7, 9–10, mtp"


def test_no_torch_is_needed() -> None:
    import subprocess
    import sys

    code = "import sys; from megacpp_mcore.observe import page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tiny_run.ROOT, check=False).returncode == 0


def test_short_numbers() -> None:
    shown = [page_charts.short(value) for value in (0, 12, 1234, 45_678, 3.2e9, 4e-5)]
    assert shown == ["0", "12", "1,234", "45.68k", "3.2G", "4.0e-5"]
    assert json.dumps([page_parts.size(2**30), page_parts.clock(3700), page_parts.clock(61.0)]) == json.dumps(
        ["1 GiB", "1 h 01 min", "61.0 s"]
    )
