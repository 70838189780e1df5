"""Samples of a GPU's clock and power; tests/gpu/test_card.py measures a real one."""

from __future__ import annotations

from pathlib import Path

from megacpp_mcore.observe import receipts
from megacpp_mcore.observe.card import REASONS, Samples
from megacpp_mcore.observe.clock import Clock
from megacpp_mcore.observe.events import Log
from tests.observe.recorded import a_step, at, receipt_writer, stepped, write_start


def test_medians_and_how_often_the_clock_was_held_down() -> None:
    samples = Samples()
    samples.take()
    assert samples.record() == {}
    given = iter([(1980, 300.0, 0), (1500, 690.0, 0b100), (1600, 700.0, 0b1000100)])
    samples.read = lambda: next(given)
    for _ in range(4):  # the last one fails
        samples.take()
    assert samples.read is None
    assert samples.record() == {
        "card.sm_clock_mhz": 1600,
        "card.power_w": 690.0,
        "card.throttled": {REASONS[2]: 2 / 3, REASONS[6]: 1 / 3},
    }


def test_the_window_is_sampled_at_heartbeats_and_the_slowest_card_is_named(tmp_path: Path) -> None:
    log = Log(tmp_path, 0, 1, Clock(), heartbeat_s=3600)
    writer = receipt_writer(log, every_s=0.0)
    writer._samples.read = lambda: (1500, 690.0, 0)
    log.on_beat()
    assert writer._samples.record() == {}  # no step has been done
    for number in range(1, 4):
        writer.on_step(a_step(number))
    log.on_beat()
    writer.on_step(a_step(4))
    writer.on_end(None)
    log.close()
    assert receipts.read(tmp_path)["card"]["sm_clock_mhz"] == 1500
    for rank in range(2):
        known = {"card.matmul_tflops_per_s": 700.0 + rank, "card.sm_clock_mhz": 1500 - rank, "card.power_w": 600 + rank}
        lines = at(0, facts={"environment": {}, "ddp.bucket_elements": [5 + rank], **known}), stepped(3 + rank, 1)
        write_start(tmp_path / "two", 1, rank, *lines, world_size=2, began=1)
    found = receipts.read(tmp_path / "two")
    assert (found["card"]["matmul_tflops_per_s"], found["card"]["sm_clock_mhz"], found["card"]["power_w"]) == (
        700,
        1499,
        600,
    )
    assert (found["time_to_first_step_s"], found["ddp"]["bucket_elements"]) == (3.0, [5])
