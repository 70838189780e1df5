"""Files as the ranks of a run leave them, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megacpp_mcore import policy
from megacpp_mcore.model.run import Run
from megacpp_mcore.model.training import Training
from megacpp_mcore.observe import receipts
from megacpp_mcore.observe.events import Log, Step
from megacpp_mcore.observe.indices import IndexOverlap
from megacpp_mcore.observe.loop import Loop
from megacpp_mcore.observe.routing import Routing

LAUNCHED = policy.resolve(Run(training=Training(device="cpu", transformer_impl="local")), environment={})
"""The policy of a run of one process on a CPU."""
SECOND = 1_000_000_000
TOKENS = 1024
"""Of a step."""


def file_of(run: Path, number: int = 1, rank: int = 0) -> Path:
    """Return the path of a rank's file in start ``number``."""
    return run / f"start_{number}" / f"rank_{rank:05d}.jsonl"


def write_start(
    run: Path,
    number: int,
    rank: int,
    *lines: dict[str, Any],
    began: float = 0,
    world_size: int = 1,
    heartbeat_s: float = 1.0,
) -> Path:
    """Write the file of one process; ``began`` in seconds."""
    first = {"began": round(began * SECOND), "rank": rank, "world_size": world_size, "host": "h", "pid": 1}
    path = file_of(run, number, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in ({**first, "heartbeat_s": heartbeat_s}, *lines)))
    return path


def write_profile(run: Path, first: int, last: int, rank: int = 0, **values: Any) -> None:
    """Write the table of one rank's profile of these steps."""
    table = {
        "steps": [first, last], "phase": "steady", "rank": rank, "families": {}, "dominant": None, "hidden_share": None,
    }  # fmt: skip
    path = run / "profile" / f"{first}-{last}" / (f"rank_{rank:05d}" if rank else "") / "table.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(table | values))


def append(path: Path, *lines: dict[str, Any]) -> None:
    """Append lines."""
    with path.open("a") as stream:
        stream.write("".join(json.dumps(line) + "\n" for line in lines))


def at(second: float, phases: dict[str, float] | None = None, **more: Any) -> dict[str, Any]:
    """Return a line at the given second, with seconds by phase."""
    spent = {} if phases is None else {"phases": {name: round(value * SECOND) for name, value in phases.items()}}
    return {"at": round(second * SECOND), **spent, **more}


def stepped(second: float, number: int, seconds: float = 1.0, resumed_at: int = 0, **phases: float) -> dict[str, Any]:
    """Return the line of a step that took ``seconds``, without losses."""
    return at(second, {"step": seconds, **phases}, step=number, resumed_at=resumed_at)


def facts(moe_enabled: bool = False, **more: Any) -> dict[str, Any]:
    """Return the line with a rank's facts; ``more`` by the writer's names."""
    values = {"moe_enabled": moe_enabled, "environment": {}}
    return at(0, facts={"unknown": {}, **values, **more})


def with_loss(line: dict[str, Any], loss: float = 2.0) -> dict[str, Any]:
    """Return the line as the last rank writes it, with losses."""
    return line | {
        "time_s": 0.0, "tokens": line["step"] * TOKENS, "losses": {"lm loss": loss}, "grad_norm": 1.0, "learning_rate": 1e-3,
        "skipped": False,
    }  # fmt: skip


def a_step(number: int, *, resumed_at: int = 0, tokens: int | None = None, loss: float = 2.0, skipped: bool = False) -> Step:
    """Return a step as listeners get it; ``tokens`` since step 0."""
    trained = number * TOKENS if tokens is None else tokens
    return Step(number, resumed_at, 0.0, trained, {"lm loss": loss}, 1.0, 1e-3, skipped)


def receipt_writer(log: Log, **more: Any) -> receipts.ReceiptWriter:
    """Return the receipt writer of this process's run, without experts or indexers unless ``more`` names them."""
    others = {"routes": Routing(), "indices": IndexOverlap(), "loop": Loop()}
    return receipts.ReceiptWriter(log, settings=None, launched=LAUNCHED, **others | more)
