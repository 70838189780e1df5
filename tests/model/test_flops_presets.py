"""The FLOP count of each preset against one derived here from its shapes only, without the package's arithmetic."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megacpp_mcore.model import flops, preset

BIG = {
    "pattern": "AEMEAEMEAEMR", "depth": 52, "hidden": 3584, "heads": 56, "ffn": 18944, "vocab": 65536, "seq": 4096,
    "q_rank": 64, "kv_rank": 64, "nope": 64, "rope": 64, "v": 64, "roles": "-FSS", "topk": 256, "i_heads": 32, "i_dim": 64,
    "m_heads": 112, "m_dim": 64, "groups": 8, "state": 64, "rank": 4, "chunk": 16, "angles": 16,
    "r_heads": 44, "r_k": 64, "r_v": 16, "kernel": 4,
    "experts": 16, "routed": 4, "e_ffn": 896, "shared": 1024, "depths": 2,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "nam56r": BIG,
    "nam56r_h4096": BIG
    | {"hidden": 4096, "heads": 32, "ffn": 21504, "state": 128, "angles": 32, "m_heads": 128, "r_heads": 48},
    "nam56r_quarter": BIG | {"depth": 13},
    "nam52": BIG | {"pattern": "AEME"},
    "nam56r_wide": BIG | {"experts": 128},
    "nam56r_long": BIG | {"seq": 32768, "roles": "WFSS", "mtp": "W", "window": 4096},
    "nam56r_tiny": {
        "pattern": "AEMEAEMEAEMR", "depth": 12, "hidden": 128, "heads": 4, "ffn": 512, "vocab": 384, "seq": 256,
        "q_rank": 32, "kv_rank": 32, "nope": 16, "rope": 16, "v": 16, "roles": "-FS", "topk": 32, "i_heads": 2, "i_dim": 16,
        "m_heads": 16, "m_dim": 16, "groups": 2, "state": 16, "rank": 2, "chunk": 16, "angles": 4,
        "r_heads": 4, "r_k": 16, "r_v": 8, "kernel": 4,
        "experts": 4, "routed": 2, "e_ffn": 128, "shared": 128, "depths": 1,
    },
}  # fmt: skip
SHAPES["nam56r_tiny_long"] = SHAPES["nam56r_tiny"] | {"seq": 1024, "roles": "WFS", "mtp": "W", "window": 256}


def matrices(*shapes: tuple[int, int]) -> int:
    """Multiply-adds of one token through weights of these shapes."""
    return sum(rows * columns for rows, columns in shapes)


def attention_matrices(s: dict[str, Any]) -> int:
    return matrices(
        (s["hidden"], s["q_rank"]),
        (s["q_rank"], s["heads"] * (s["nope"] + s["rope"])),
        (s["hidden"], s["kv_rank"] + s["rope"]),
        (s["kv_rank"], s["heads"] * (s["nope"] + s["v"])),
        (s["heads"] * s["v"], s["hidden"]),
    )


def expected(s: dict[str, Any], sequence: int) -> tuple[dict[str, list[int]], list[dict[str, list[int]]]]:
    """Multiply-adds ``[forward, backward]`` of one sequence by family: of the trunk, and of each MTP depth."""
    causal = sum(query + 1 for query in range(sequence))
    selected = sum(len(range(max(0, query + 1 - s["topk"]), query + 1)) for query in range(sequence))
    windowed = sum(min(query + 1, s.get("window", 1)) for query in range(sequence))
    chunks = len(range(0, sequence, s["chunk"]))
    trunk: dict[str, list[int]] = {field.name: [0, 0] for field in dataclasses.fields(flops.Families)}

    def count(into: dict[str, list[int]], family: str, forward: int, backward: int | None = None) -> None:
        into[family][0] += forward
        into[family][1] += 2 * forward if backward is None else backward

    seen = 0
    for position in range(s["depth"]):
        letter = s["pattern"][position % len(s["pattern"])]
        if letter == "A":
            role = s["roles"][seen % len(s["roles"])]
            seen += 1
            count(trunk, "attention_projections", sequence * attention_matrices(s))
            if role in "-W":
                pairs = causal if role == "-" else windowed
                count(trunk, "attention_core", pairs * s["heads"] * (s["nope"] + s["rope"] + s["v"]))
            else:
                count(trunk, "attention_core", selected * s["heads"] * (s["kv_rank"] + s["rope"] + s["kv_rank"]))
            if role == "F":
                weights = matrices(
                    (s["q_rank"], s["i_heads"] * s["i_dim"]), (s["hidden"], s["i_dim"]), (s["hidden"], s["i_heads"])
                )
                pair = s["i_heads"] * s["i_dim"] + s["i_heads"]
                # Backward: weights' gradients (the input is detached), two operands of each selected pair.
                count(trunk, "indexer", sequence * weights + causal * pair, sequence * weights + 2 * selected * pair)
        elif letter == "M":
            inner = s["m_heads"] * s["m_dim"]
            inputs = 2 * inner + 2 * s["rank"] * s["groups"] * s["state"] + 3 * s["m_heads"] + s["angles"]
            count(trunk, "mamba_projections", sequence * matrices((s["hidden"], inputs), (inner, s["hidden"])))
            rows = s["chunk"] * s["rank"]
            scan = rows * rows * s["state"] + rows * rows * s["m_dim"] + 2 * rows * s["state"] * s["m_dim"]
            count(trunk, "mamba_scan", s["m_heads"] * (chunks * scan + sequence * s["rank"] * s["m_dim"]))
        elif letter == "E":
            count(trunk, "router", sequence * s["hidden"] * s["experts"])
            rows = sequence * s["routed"]
            count(trunk, "routed_experts", rows * matrices((s["hidden"], s["e_ffn"]), (s["e_ffn"], s["hidden"])))
            shared = matrices((s["hidden"], s["shared"]), (s["shared"], s["hidden"]))
            count(trunk, "shared_experts", sequence * shared)
        else:
            values = s["r_heads"] * s["r_v"]
            inputs = 2 * s["r_k"] + values + s["r_heads"] + values
            count(trunk, "recurrent_projections", sequence * matrices((s["hidden"], inputs), (values, s["hidden"])))
            count(trunk, "convolution", sequence * s["kernel"] * (2 * s["r_k"] + values))
            count(trunk, "recurrence", sequence * s["r_heads"] * (s["r_k"] * s["r_v"] * s["r_v"] + s["r_k"] * s["r_v"]))
    head = sequence * s["hidden"] * s["vocab"]
    count(trunk, "head", head)
    depths = []
    for _ in range(s["depths"]):
        depth: dict[str, list[int]] = {name: [0, 0] for name in trunk}
        count(depth, "mtp_projection", sequence * matrices((2 * s["hidden"], s["hidden"])))
        count(depth, "attention_projections", sequence * attention_matrices(s))
        pairs = windowed if "mtp" in s else causal
        count(depth, "attention_core", pairs * s["heads"] * (s["nope"] + s["rope"] + s["v"]))
        count(depth, "dense_ffn", sequence * matrices((s["hidden"], s["ffn"]), (s["ffn"], s["hidden"])))
        count(depth, "head", head)
        depths.append(depth)
    return trunk, depths


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("sequence", [None, 24, 1000, 5000])
def test_each_part_of_each_preset(name: str, sequence: int | None) -> None:
    """At the preset's own length, below top-k, and where the last chunk of the scan is cut."""
    shapes = SHAPES[name]
    length = shapes["seq"] if sequence is None else sequence
    trunk, depths = expected(shapes, length)
    step = flops.step(preset(name), 3, seq_length=sequence)
    for part, counted in ((trunk, step.trunk), *zip(depths, step.mtp, strict=True)):
        wanted = {key: {"forward": 6 * forward, "backward": 6 * backward} for key, (forward, backward) in part.items()}
        assert dataclasses.asdict(counted) == wanted
    total = sum(2 * sum(values) for part in (trunk, *depths) for values in part.values())
    assert (step.tokens, step.total.training) == (3 * length, 3 * total)
