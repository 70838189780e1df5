"""The page about a run: of a real one, in a real browser; and that what files say cannot break it."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import re
import signal
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.commands import cli
from megacpp_mcore.commands import report_page as page
from megacpp_mcore.observe import goodput, receipts
from tests import browser, tiny_run
from tests.observe import real_run
from tests.observe.recorded import append, at, file_of, stepped, with_loss, write_start

STEPS = 8
RECEIPTS = tiny_run.ROOT / "examples" / "receipts"
VOID = {"meta", "br", "hr", "img", "link"}
PARTS = (
    "figures", "loss", "loss-plot", "time", "time-plot", "goodput", "goodput-bar", "shares", "memory", "backends", "by-step",
)  # fmt: skip
"""What every page of a run has, by its ``data-part``."""


@pytest.fixture(scope="module")
def killed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in step 4 and resumed from step 3 with a fall-back, profiled."""
    folder = tmp_path_factory.mktemp("page")
    run = folder / "killed"
    save: tuple[str, ...] = ("--save", str(folder / "saved"), "--save-interval", "3", "--ckpt-format", "torch_dist")
    save += ("--eval-interval", "5", "--eval-iters", "1")
    real_run.start(run, data, STEPS, *save, fate="kill").finish(-signal.SIGKILL)
    time.sleep(0.5)
    real_run.start(run, data, STEPS, *save, "--load", str(folder / "saved"), fate="fall-back profile").finish()
    return run


class Reader(HTMLParser):
    """Collects text and attributes, and fails on tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def parts(self) -> set[str]:
        return {value for name, value in self.attributes if name == "data-part" and value is not None}


def check_self_contained(text: str) -> Reader:
    """Check that the page fetches nothing and runs no script."""
    dom = Reader(text)
    assert not {name for name, _ in dom.attributes} & {"src", "href", "srcset", "data", "action", "onload", "onclick"}
    for word in ("http:", "https:", "<script", "url(", "@import", "//", "href="):
        assert word not in text, word
    assert "default-src 'none'" in text
    assert ("name", "viewport") in dom.attributes
    return dom


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_page_of_a_killed_run_with_a_fall_back(killed: Path) -> None:
    dom = check_self_contained(page.html(killed))
    assert set(PARTS) | {"disqualifiers", "receipts"} <= dom.parts()
    shown = [name for name in goodput.CLASSES if f"[{name}]" in dom.text]
    assert set(shown) >= {*goodput.CLASSES} - {"down", "evaluation"}


def test_a_receipt_alone_has_what_needs_no_folder_and_backends_that_deviate_first(tmp_path: Path) -> None:
    receipt = receipts.read(RECEIPTS / "nam56r_quarter_h200_bf16.json")
    slow = receipt["backends"][-1] | {"op": "mla", "requested": "sdpa", "observed": "reference", "reason": "why"}
    file = tmp_path / "receipt.json"
    file.write_text(json.dumps(receipt | {"backends": [*receipt["backends"], slow]}))
    parts = check_self_contained(text := page.html(file)).parts()
    assert {"backends", "shares", "memory", "figures"} <= parts
    assert not {"loss-plot", "time-plot", "goodput-bar"} & parts
    first, *others = re.findall(r'<tr(?: class="off")?><td class="wide">.*?</tr>', text)
    assert first.startswith('<tr class="off">')
    assert re.findall(r">([^<]+)<", first) == ["mla", slow["layers"], "sdpa", "≠ reference", "why"]
    assert len(others) == len(receipt["backends"])
    assert not [row for row in others if 'class="off"' in row or ">≠" in row or ">slower" in row]


LOOKS = """({
  widths: [window.innerWidth, document.documentElement.scrollWidth],
  paper: window.getComputedStyle(document.body).backgroundColor,
  boxes: Object.fromEntries([...document.querySelectorAll('[data-part]')].map(
    e => [e.dataset.part, (b => [b.left, b.top, b.right, b.bottom])(e.getBoundingClientRect())])),
  sticking_out: [...document.querySelectorAll('body *')].filter(e => e.getClientRects().length &&
    (e.getBoundingClientRect().right > window.innerWidth + 1 || e.getBoundingClientRect().left < -1))
    .map(e => e.outerHTML.slice(0, 80))})"""


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_part_is_painted(killed: Path, tmp_path: Path, width: int, dark: bool) -> None:
    """Every part has its own space in the window and is not blank; nothing is fetched and there are no errors."""
    looks, picture = browser.show(page.html(killed), tmp_path, LOOKS, width=width, dark=dark)
    assert looks["widths"] == [width, width]
    assert (looks["paper"] == "rgb(19, 21, 24)") == dark
    assert looks["sticking_out"] == []
    assert set(PARTS) | {"disqualifiers"} <= looks["boxes"].keys()
    for name, (left, top, right, bottom) in looks["boxes"].items():
        assert 0 <= left < right <= width, name
        assert min(right - left, bottom - top) >= (60 if name.startswith("by-step") else 18), (name, left, top)
        assert len(picture.crop((left, top, right, bottom)).getcolors(1 << 24) or ()) >= 4, (name, "is blank")


NASTY = "</style><script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


def poisoned(value: Any) -> Any:
    """Return ``value`` with markup appended to every text."""
    if isinstance(value, str):
        return value + NASTY
    if isinstance(value, list):
        return [poisoned(entry) for entry in value]
    if isinstance(value, dict):
        return {key: poisoned(entry) for key, entry in value.items()}
    return value


def test_markup_in_the_files_of_a_run_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No text of the receipt, no name of a loss, no reason and no name of a folder comes through as markup."""
    receipt = receipts.read(RECEIPTS / "nam56r_quarter_h200_bf16.json")
    nasty = poisoned(copy.deepcopy(receipt))
    nasty["shares"]["groups"] = {name + NASTY: share for name, share in receipt["shares"]["groups"].items()}
    for row in nasty["backends"]:
        row["layers"] = "1-3"  # no other text is valid
    run = run_of(tmp_path / "<b>run & co")
    more = with_loss(stepped(6, 2)) | {"losses": {"lm loss": 3.0, "mtp_1 loss" + NASTY: 2.0, NASTY: 1.0}}
    append(file_of(run), more, with_loss(stepped(7, 3)) | {"losses": more["losses"]})
    bad = dataclasses.replace(page.read(run), receipt=nasty)
    monkeypatch.setattr(page, "read", lambda path: dataclasses.replace(bad, name=f"<b>{path}"))
    text = page.html("one")
    dom = Reader(text)
    assert "<script" not in text
    assert "<img" not in text
    assert "<b>one" not in text
    assert "src" not in {name for name, _ in dom.attributes}
    assert NASTY in dom.text


def run_of(run: Path) -> Path:
    """A run's folder, as small as it can be: five seconds of a start, three of them a step."""
    began = 1_700_000_000  # 2023-11-14, 22:13:20 UTC
    step = with_loss(stepped(began + 4, 1, 3, startup=1), 3.0)
    write_start(run, 1, 0, step, at(began + 5, {"idle": 1}, how="finished"), began=began)
    return run


def test_a_page_of_the_smallest_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says when the run began and when its receipt was made, and calls the classes as the command does."""
    output = tmp_path / "out.html"
    assert cli.main(["report", "html", str(run_of(tmp_path)), "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"page: {output}\n"
    assert cli.main(["report", "html", str(run_of(tmp_path / "again")), "--output", str(output)]) == 0  # in its place
    dom = check_self_contained(output.read_text(encoding="utf-8"))
    assert "2023-11-14T22:13:20+00:00" in dom.text
    assert {"loss-plot", "time-plot", "goodput-bar"} <= dom.parts()
    write_start(tmp_path, 2, 0, with_loss(stepped(1_700_000_024, 2, resumed_at=1)), began=1_700_000_020)
    assert {"resumed at 1", "restarted from step 1"} <= set(Reader(page.html(tmp_path)).text.split("\n"))


def drawn(points: list[tuple[float, float]], **more: Any) -> str:
    return str(page._chart("p", "what it shows", [page._Curve("a", "c1", points)], **more))


def test_a_long_curve_keeps_its_extremes_and_is_short() -> None:
    noise = random.Random(1)
    points = [(float(x), 5.0 + noise.random() + (x == 12_345) * 3 - (x == 777) * 2) for x in range(50_000)]
    text = drawn(points)
    curve = max(re.findall(r' d="([^"]+)"', text), key=len)
    top, *others, bottom = sorted(float(y) for y in re.findall(r"[ML] \S+ (\S+)", curve))
    assert min(others[0] - top, bottom - others[-1]) > 40  # the two extremes, apart from the rest
    assert len(text) < 90_000


def test_charts_are_of_the_page_and_of_whole_steps() -> None:
    text = drawn([(1.0, 2.0), (2.0, 3.0)], marks=[(1.5, "a mark")])
    dom = Reader(text)
    assert {"a mark", "step"} <= set(dom.text.split("\n"))
    assert "1.5" not in dom.text
    assert text.count("<svg") == 2
    assert "stroke-linecap: round" in drawn([(1.0, 2.0)])
    assert ("aria-label", "what it shows") in dom.attributes
    assert re.findall(r"#0bad\w\w|http|url\(", text) == []
    assert "var(--c1)" in text


def test_without_matplotlib_there_are_no_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "can_draw", lambda: False)
    text = page.html(run_of(tmp_path))
    assert "<svg" not in text
    assert {"figures", "goodput-bar"} <= check_self_contained(text).parts()


def test_every_class_of_time_has_a_colour_and_a_word() -> None:
    template = Path(page.__file__).with_suffix(".html").read_text(encoding="utf-8")
    assert all(f"--{name}: #" in template and f'"{name}": "' in template for name in goodput.CLASSES)
