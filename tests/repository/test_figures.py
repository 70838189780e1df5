"""Every speed that README.md and docs/ state is a row of a file that the section names; every difference is beyond noise."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megacpp_mcore.observe.receipts.claims import NOISE

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
PAGES = {
    path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}

FIGURE = re.compile(r"(?<![\d.,])(\d[\d,]*(?:\.\d+)?) (?:ms|tokens/s)\b")
HEADS = re.compile(r"\b(?:ms|tokens/s)\b")
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
SPEEDS = ("ms", "step_ms", "median_step_ms", "tokens_per_s", "device_ms", "host_ms", "listeners_ms")
"""Columns of result files."""

THOUSANDS = re.compile(r"\b\d+,\d{3}\b")
COMPARING = re.compile(r"\b(?:instead of|in place of|where|ours|than|against|cuDNN)\b")
PERCENT = re.compile(
    r"(\d+(?:\.\d+)?)(?: to \d+(?:\.\d+)?)? % (?:faster|slower|more tokens|less time|longer|of a step)"
)


def sections(page: str) -> Iterator[str]:
    """The text of each heading of the first three levels, without blocks of code."""
    prose = re.sub(r"^```.*?^```\n", "", page, flags=re.DOTALL | re.MULTILINE)
    yield from re.split(r"^#{1,3} ", prose, flags=re.MULTILINE)


def table_rows(section: str) -> Iterator[tuple[list[str], list[str]]]:
    """Of every row of a table its head and its cells."""
    for table in re.findall(r"(?:^\|.*\|\n)+", section, re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.strip()[1:-1].split("|")] for line in table.splitlines())
        yield from ((head, row) for row in rows)


def figures(section: str) -> Iterator[tuple[str, int]]:
    """Speeds as they are written, and the number of devices over which they are an average."""
    for found in FIGURE.finditer(section):
        yield found[1], 1
    for head, row in table_rows(section):
        for name, cell in zip(head, row, strict=False):
            if HEADS.search(name) and (found := re.match(rf"{NUMBER.pattern}", cell)):
                yield found[0], 4 if "a GPU" in name else 1


def named(section: str) -> list[Path]:
    """The files of results that a section names."""
    found = re.findall(r"\b(\w+_(?:h[12]00|cpu)\.(?:csv|txt))|(experiments/results/README\.md)", section)
    return [RESULTS / (file or "README.md") for file, _ in found]


def speeds(files: Sequence[Path]) -> list[float]:
    """The speeds in ``files``: of a table those of its columns, of a text every number."""
    found: list[float] = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".csv":
            rows = csv.DictReader(text.splitlines())
            found += [float(row[name]) for row in rows for name in SPEEDS if row.get(name) not in (None, "")]
        else:
            found += [float(number.replace(",", "").rstrip(".")) for number in NUMBER.findall(text)]
    return found


def is_rounded(figure: str, value: float) -> bool:
    """Whether ``figure`` is ``value``, rounded to its digits; tokens/s of 10,000 or more may be rounded to hundreds."""
    digits = len(figure.partition(".")[2])
    unit = 100 if re.fullmatch(r"\d+,\d00", figure) else 10**-digits
    return abs(float(figure.replace(",", "")) - value) <= 0.5001 * unit


def unfounded(page: str) -> list[str]:
    """The speeds of a page that no file has which their section, or the page's introduction, names."""
    missing = []
    introduction = page.partition("\n## ")[0]
    for section in sections(page):
        known = speeds(named(introduction) + named(section))
        for figure, most in figures(section):
            if not any(is_rounded(figure, value / devices) for value in known for devices in {1, 2, most}):
                missing.append(f"{figure} of {section.splitlines()[0]!r}")
    return missing


def statements(page: str) -> Iterator[str]:
    """Sentences and rows of tables."""
    for section in sections(page):
        yield from (" | ".join(row) for _, row in table_rows(section))
        prose = re.sub(r"^\|.*\|\n", "\n", section, flags=re.MULTILINE)
        for block in re.split(r"\n\s*\n|^- ", prose, flags=re.MULTILINE):
            yield from re.split(r"(?<=[.:;]) +", " ".join(block.split()))


def in_noise(page: str) -> list[str]:
    """Statements of differences below the noise floor that do not say so."""
    found = []
    for one in statements(page):
        small = [share for share in PERCENT.findall(one) if float(share) < 100 * NOISE]
        speeds_of = [float(figure.replace(",", "")) for figure in FIGURE.findall(one) or THOUSANDS.findall(one)]
        if COMPARING.search(one) and len(speeds_of) > 1:
            small += [str(speeds_of)] if max(speeds_of) < (1 + NOISE) * min(speeds_of) else []
        if small and "noise" not in one:
            found.append(one)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_speed_is_in_a_file_that_its_section_names(page: str) -> None:
    assert unfounded(PAGES[page]) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_difference_is_beyond_noise_or_says_so(page: str) -> None:
    assert in_noise(PAGES[page]) == []


@pytest.mark.parametrize(
    ("page", "figure"),
    [
        ("# A\nIt takes 1.23 ms.\n", "1.23"),
        ("# A\n\n## B\n`bench_h200.csv`\n\n## C\nIt takes 2.73 ms.\n", "2.73"),
        ("# A\n`bench_h200.csv` has 2.74 ms.\n", "2.74"),
        ("# A\n`nam56r_h200.csv`\n\n| | tokens/s |\n|---|---|\n| one | 19,761 |\n", "19,761"),
    ],
)
def test_a_speed_without_its_row_is_found(page: str, figure: str) -> None:
    assert [each.split()[0] for each in unfounded(page)] == [figure]


def test_rounded_speeds_of_named_files_are_founded() -> None:
    page = "# A\n`bench_h200.csv`: 2.7 ms. `nam56r_h200.csv`: 19,800 tokens/s, or 9,880 tokens/s of two.\n"
    assert unfounded(page) == []


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("It is 4 % faster.", True),
        ("It saves 2.4 % of a step.", True),
        ("It is 8 % faster.", False),
        ("It is 4 % faster, within noise.", False),
        ("It takes 1658 ms where ours takes 1696 ms.", True),
        ("It takes 1.0 ms instead of 2.0 ms.", False),
    ],
)
def test_differences_in_noise_are_found(text: str, is_found: bool) -> None:
    assert bool(in_noise(f"# A\n\n{text}\n")) == is_found
