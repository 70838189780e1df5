"""The console of a launch: what is left on it, and the file that has the rest."""

from __future__ import annotations

import logging
import re
import shutil
import warnings
from pathlib import Path

import pytest

from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.errors import LaunchError
from megacpp_mcore.launch import process
from megacpp_mcore.util import console
from tests import stock, tiny_run
from tests.lanes import exhaustive_but

STEPS = 3
STEP = r"step \d/3  loss \d\.\d{4}"
PACE = r"  [0-9.]+ s/step  0:00:\d\d left"


@pytest.mark.slow
@pytest.mark.parametrize("observed", exhaustive_but([True, False], True))
def test_a_launch_prints_few_lines_then_one_a_step(observed: bool, tmp_path: Path) -> None:
    """And the same losses as Megatron's own lines in the file; a failure shows the end of that file."""
    (tmp_path / "a.txt").write_text("A text.\n" * 400)
    prepare([str(tmp_path / "a.txt")], str(tmp_path / "text"))
    model = tiny_run.preset("nam56r_tiny")
    data = ("--data-path", str(tmp_path / "text"), "--split", "100,0,0")
    words = stock.words(model, data=data, global_batch_size=1, train_iters=STEPS)
    folder = ["--observe", str(tmp_path / "run")] if observed else ["--no-observe"]
    program = ["megacpp_mcore", "launch", "--device", "cpu", *folder, "--"]
    lines = tiny_run.start(program, words, None).finish().splitlines()
    before = next(number for number, line in enumerate(lines) if line.startswith("step "))
    assert 10 < before <= 40
    first, *others = lines[before : before + STEPS]
    assert re.match(STEP, first)
    assert not re.search(PACE, first)
    assert all(re.match(STEP, line) and re.search(PACE + "$", line) for line in others)
    assert lines[before + STEPS :] == []
    (named,) = (found[1] for line in lines if (found := re.search(r"Megatron's output is in (\S+);", line)))
    log = Path(named).read_text()
    if observed:
        assert Path(named).parent == tmp_path / "run"
    else:
        shutil.rmtree(Path(named).parent)
    assert "end of arguments" in log
    assert "CPU lane: torch.Tensor.record_stream" in log
    loss = re.search(r"iteration +1/ +3 .* lm loss: (\S+)", log)
    assert loss is not None
    assert f"loss {float(loss[1]):.4f}" in first


@pytest.mark.parametrize(
    ("rank", "size", "whose"), [(0, 1, ""), (0, 3, " of rank 0"), (1, 3, None), (2, 3, " of rank 2")]
)
def test_the_files_of_the_first_and_the_last_rank_are_named(
    rank: int,
    size: int,
    whose: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last one's has Megatron's lines of steps."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))
    with process.quiet(tmp_path) as log:
        print("Megatron's line")
    assert log.read_text().startswith("Megatron's line\n")
    named = f"megacpp-mcore: Megatron's output{whose} is in {log}; --verbose leaves it on the console\n"
    assert capsys.readouterr().out == ("" if whose is None else named)


@pytest.mark.parametrize("leads_to", ["nowhere", "run"])
def test_a_folder_that_is_a_link_to_nothing_or_to_itself_is_refused(leads_to: str, tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / leads_to)
    with pytest.raises(LaunchError, match=f"{tmp_path / 'run'} "):
        process.quiet(tmp_path / "run").__enter__()


def test_only_our_lines_and_warnings_are_left_on_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    torch = logging.getLogger("torch")
    handler = logging.StreamHandler()
    torch.addHandler(handler)
    try:
        before = handler.stream
        with console.redirected(log):
            print("Megatron's line")
            warnings.warn("deprecated", stacklevel=1)
            torch.error("torch's line")
            logging.getLogger("megacpp_mcore.observe").warning("ours matters")
            logging.getLogger("megacpp_mcore.observe").info("ours does not")
            console.say("our line")
        assert handler.stream is before
    finally:
        torch.removeHandler(handler)
    print("afterwards")
    printed = capsys.readouterr()
    assert printed.out == "our line\nafterwards\n"
    assert printed.err == "megacpp-mcore: WARNING: ours matters\n"
    text = log.read_text()
    assert "Megatron's line\n" in text
    assert "torch's line\n" in text
