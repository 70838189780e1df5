"""Speeds in README.md and docs/ are tables of rows (experiments/figures.py); every difference is beyond noise or says so."""

from __future__ import annotations

import re

import pytest

from experiments import figures, scaling
from megacpp_mcore.model.run import BUCKET_ELEMENTS
from megacpp_mcore.observe.receipts.claims import NOISE, NOISE_IN_GRAPHS

GENERATED = ("patches.md", "model-card.md")
PAGES = {path.name: path.read_text(encoding="utf-8") for path in figures.PAGES if path.name not in GENERATED}
SPEED = re.compile(r"(?<![\d.,])\d[\d,.]* (?:ms|tokens/s)\b")
PERCENT = re.compile(r"(\d+(?:\.\d+)?)(?: to \d+(?:\.\d+)?)? % (?:faster|slower|more tokens|less time|longer|of a step)")


def speeds_outside_of_tables(page: str) -> list[str]:
    """Return the speeds of a page that appear in no table of rows."""
    return SPEED.findall(figures.BLOCK.sub("", re.sub(r"^```.*?^```\n", "", page, flags=re.DOTALL | re.MULTILINE)))


def differences_in_noise(page: str) -> list[str]:
    """Return statements of differences below the noise floor that do not say so."""
    sentences = re.split(r"(?<=[.:;])\s|\n\s*\n|^- |\n\|", page, flags=re.MULTILINE)
    return [
        one
        for one in (" ".join(sentence.split()) for sentence in sentences)
        if "noise" not in one
        and any(float(share) < 100 * (NOISE_IN_GRAPHS if "CUDA graphs" in one else NOISE) for share in PERCENT.findall(one))
    ]


@pytest.mark.parametrize("page", PAGES)
def test_speeds_are_one_dated_table_of_rows_and_differences_beyond_noise_or_said_to_be_in_it(page: str) -> None:
    """After a change of rows or of a table: python -m experiments.figures"""
    text = PAGES[page]
    assert figures.rendered(text) == text
    introduction, _, rest = text.partition("\n## ") if page == "README.md" else ("", "", text)
    assert speeds_outside_of_tables(rest) == []
    assert len(speeds_outside_of_tables(introduction)) == (page == "README.md")
    for section in (section for section in re.split(r"^## ", text, flags=re.MULTILINE) if "<!-- figures" in section):
        assert re.search(r"\b20\d\d-\d\d-\d\d\b", section.partition("<!--")[0])
    of_speeds = [block for block in figures.BLOCK.finditer(text) if re.search(r"tokens/s|\bms\b", block[0])]
    assert len(of_speeds) <= (2 if page == "README.md" else 1)
    assert differences_in_noise(text) == []


def test_the_introduction_of_the_readme() -> None:
    """Size, speed and cost are those of the model and of the first row of its table."""
    introduction = " ".join(PAGES["README.md"].partition("\n## ")[0].split())
    card = (figures.ROOT / "docs" / "model-card.md").read_text(encoding="utf-8")
    depth, *_, total, active, _ = re.findall(r"^\| `nam56r` \| (.*) \|$", card, re.MULTILINE)[0].split(" | ")
    assert f"of {depth} layers with {int(total.replace(',', '')) / 1e9:.1f} B parameters" in introduction
    assert f"{int(active.replace(',', '')) / 1e9:.1f} B of them active" in introduction
    first, *_ = list(figures.models())[1:]
    shape = r"([\d,]+) to ([\d,]+) tokens/s \((\d+) to (\d+) % MFU\): a billion tokens take (\d+) to (\d+) GPU-hours"
    speeds_mfu_hours = re.search(shape, introduction)
    assert speeds_mfu_hours
    slowest, fastest = (float(cell.replace(",", "")) for cell in first[1:3])
    mfu = [f"{float(cell):.0f}" for cell in first[3:5]]
    hours = [f"{1e9 / speed / 3600:.0f}" for speed in (fastest, slowest)]
    assert [*speeds_mfu_hours.groups()] == [*first[1:3], *mfu, *hours]


def test_a_figure_without_a_row_cannot_be_written() -> None:
    with pytest.raises(LookupError):
        figures.op("mla", "a variant that nobody measured")
    assert figures.number(19428) == "19,400"
    assert [figures.number(value) for value in (0.7208, 15.73, 187.47)] == ["0.72", "15.7", "187"]


def test_the_model_on_paper_and_the_rows_of_two_and_four_gpus() -> None:
    """By how much rows are faster, in percent of one GPU's speed; one constant is fitted to those of 120 million."""
    alone = float(figures.one("gpus_h200", arm="micro-batch 2", commit="cbb992c")["step_ms"])
    misses = {
        (gpus, bucket): [100 * (share - alone / scaling.Replicas(gpus, bucket=bucket).step(alone)) for share in shares]
        for (gpus, bucket), shares in figures.shares_of_one().items()
    }
    assert misses == {
        (2, BUCKET_ELEMENTS): pytest.approx([0.0], abs=0.05),
        (4, BUCKET_ELEMENTS): pytest.approx([0.2], abs=0.05),
        (2, scaling.MEGATRONS_BUCKET): pytest.approx([0.2, -0.6], abs=0.05),
        (4, scaling.MEGATRONS_BUCKET): pytest.approx([-0.2], abs=0.05),
    }


def test_a_network_slower_than_a_ring_within_a_host_slows_hosts_on_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps() -> list[float]:
        return [scaling.Replicas(gpus).step(1687.0) for gpus in (8, 64)]

    usual = steps()
    monkeypatch.setattr(scaling, "NETWORK", scaling.NETWORK / 2)
    host, hosts = steps()
    assert host == usual[0]
    assert hosts > usual[1]


@pytest.mark.parametrize(("hop", "fastest", "gain"), [(scaling.NETWORK_HOP, 4, 0.2), (0.1, 8, 0.9)])
def test_a_few_instances_of_the_optimizer_gain_little_on_paper(
    monkeypatch: pytest.MonkeyPatch, hop: float, fastest: int, gain: float
) -> None:
    monkeypatch.setattr(scaling, "NETWORK_HOP", hop)
    steps = {1 << power: scaling.Replicas(512, instances=1 << power).step(1687.0) for power in range(10)}
    assert min(steps, key=steps.__getitem__) == fastest
    assert 100 * (1 - steps[fastest] / steps[1]) == pytest.approx(gain, abs=0.05)
    assert all(steps[number] < steps[1] for number in (2, 4, 8))
    assert all(steps[number] > steps[1] for number in (64, 128, 256, 512))
