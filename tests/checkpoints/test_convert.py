"""A checkpoint of 0.1.0 is refused by name and converted to the byte; what cannot be converted is refused beforehand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megacpp_mcore.checkpoints import convert as checkpoint_convert
from megacpp_mcore.checkpoints import layout as checkpoint_layout
from megacpp_mcore.checkpoints import rewrite
from megacpp_mcore.commands import cli
from megacpp_mcore.errors import CheckpointError
from tests.saved import as_0_1_0, objects_in, tensors_in, write

D, HEADS, GROUPS, P, RANK, N, ANGLES = 7, 4, 2, 3, 2, 5, 2
R_HEADS, K, V = 3, 4, 2
STATES = ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.", "optimizer.state.fp32_param.")
MAMBA, RECURRENT = "decoder.layers.2.self_attention.", "decoder.layers.11.self_attention."
SHAPES: Mapping[str, tuple[int, ...]] = {
    **{f"{MAMBA}in_proj.weight.{part}": (HEADS * P, D) for part in "zx"},
    **{f"{MAMBA}in_proj.weight.{part}": (GROUPS * RANK * N, D) for part in "BC"},
    **{f"{MAMBA}in_proj.weight.{part}": (HEADS, D) for part in ("dt", "A", "trap")},
    f"{MAMBA}in_proj.weight.angles": (ANGLES, D),
    **{f"{MAMBA}{name}": (HEADS * RANK * N,) for name in ("b_bias", "c_bias")},
    **{f"{MAMBA}{name}": (HEADS * RANK * P,) for name in ("mimo_x", "mimo_z", "mimo_o")},
    f"{MAMBA}out_proj.weight": (D, HEADS * P),
    f"{MAMBA}D": (HEADS,),
    **{f"{RECURRENT}in_proj.weight.{part}": (K, D) for part in "qk"},
    **{f"{RECURRENT}in_proj.weight.{part}": (R_HEADS * V, D) for part in "vg"},
    f"{RECURRENT}in_proj.weight.f": (R_HEADS, D),
    f"{RECURRENT}W": (R_HEADS * V * V,),
    f"{RECURRENT}v_conv_weight": (R_HEADS * V, 4),
    "decoder.layers.1.mlp.experts.experts.linear_fc1.weight": (2, 3, 4),  # of three axes, and not ours
    "embedding.word_embeddings.weight": (11, D),
}
OBJECTS = {
    f"{MAMBA}in_proj._extra_state/shard_0_1": [None],
    f"{MAMBA}bc_proj._extra_state/shard_0_1": [None],
    f"{MAMBA}out_proj._extra_state/shard_0_1": [None],
    f"{RECURRENT}in_proj._extra_state/shard_0_1": [None],
    "rng_state/shard_0.0_1.1": [[{"seed": 7}]],
}
CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


def today() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        state + name: torch.randn(shape, generator=generator).to(torch.float32 if state else torch.bfloat16)
        for state in STATES
        for name, shape in SHAPES.items()
    }


def former() -> dict[str, torch.Tensor]:
    return as_0_1_0(today(), groups=GROUPS, rank=RANK, values=V)


def save_former(
    folder: Path,
    change: Callable[[dict[str, torch.Tensor]], None] = lambda _: None,
    content: Mapping[str, Any] = CONTENT,
) -> Path:
    """A folder of ``--save`` with a checkpoint of 0.1.0 of iteration 30; ``change`` may edit its tensors."""
    tensors = former()
    change(tensors)
    common = {"iteration": 30, "content_metadata": dict(content)}
    write(folder / "iter_0000030", tensors, OBJECTS, common)
    (folder / "latest_checkpointed_iteration.txt").write_text("30")
    return folder


def test_the_former_layout_is_what_0_1_0_had() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in former().items()}
    assert shapes[f"{MAMBA}in_proj.weight"] == (HEADS * (2 * P + 3), D)
    assert shapes[f"{MAMBA}bc_proj.weight"] == (2 * GROUPS * RANK * N, D)
    assert shapes[f"optimizer.state.exp_avg.{MAMBA}b_bias"] == (HEADS, RANK, N)
    assert shapes[f"{MAMBA}mimo_o"] == (HEADS, RANK, P)
    assert shapes[f"{RECURRENT}in_proj.weight"] == (R_HEADS * (2 * V + 1), D)
    assert shapes[f"{RECURRENT}qk_weight"] == (2 * K, D)
    assert shapes[f"{RECURRENT}W"] == (R_HEADS, V, V)


@pytest.mark.parametrize("named", ["", "iter_0000030"])
def test_every_tensor_comes_out_to_the_byte(named: str, tmp_path: Path) -> None:
    from megatron.core.dist_checkpointing import load_common_state_dict

    old = save_former(tmp_path / "old")
    before = {path: path.read_bytes() for path in sorted(old.rglob("*")) if path.is_file()}
    done = checkpoint_convert.convert(old / named, tmp_path / "new")
    assert done == checkpoint_convert.Converted(tmp_path / "new" / "iter_0000030", 2, 4 * (3 + 5 + 2 + 1))
    found, expected = tensors_in(done.folder), today()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert objects_in(done.folder) == {*list(OBJECTS)[2:3], "rng_state/shard_0.0_1.1", rewrite._COMMON}
    common = load_common_state_dict(str(done.folder))
    assert common == {"iteration": 30, "content_metadata": {**CONTENT, "megacpp_layout": 2}}
    assert (tmp_path / "new" / "latest_checkpointed_iteration.txt").read_text() == "30"
    assert {path: path.read_bytes() for path in sorted(old.rglob("*")) if path.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


def test_siso_has_no_rank_mixes(tmp_path: Path) -> None:
    expected = {name: tensor for name, tensor in today().items() if "mimo" not in name}
    write(
        tmp_path / "old", as_0_1_0(expected, groups=GROUPS, rank=RANK, values=V), common={"content_metadata": CONTENT}
    )
    found = tensors_in(checkpoint_convert.convert(tmp_path / "old", tmp_path / "new").folder)
    assert found.keys() == expected.keys()


def test_a_model_of_other_families_is_marked_and_copied(tmp_path: Path) -> None:
    tensors = {"embedding.word_embeddings.weight": torch.arange(6.0).view(2, 3)}
    write(tmp_path / "old", tensors, common={"content_metadata": CONTENT})
    done = checkpoint_convert.convert(tmp_path / "old", tmp_path / "new")
    assert (done.layers, done.tensors) == (0, 0)
    assert torch.equal(tensors_in(done.folder)["embedding.word_embeddings.weight"], torch.arange(6.0).view(2, 3))


def test_the_other_files_come_along(tmp_path: Path) -> None:
    from megatron.core.dist_checkpointing.validation import save_integrity_manifest, verify_integrity_manifest

    folder = save_former(tmp_path / "old") / "iter_0000030"
    (folder / "train_state.pt").write_bytes(b"bridge")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.json").write_text("{}")
    save_integrity_manifest(str(folder))
    new = checkpoint_convert.convert(tmp_path / "old", tmp_path / "new").folder
    assert (new / "train_state.pt").read_bytes() == b"bridge"
    assert (tmp_path / "new" / "latest_train_state.pt").read_bytes() == b"bridge"
    assert (new / "tokenizer" / "vocab.json").read_text() == "{}"
    assert json.loads((new / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    verify_integrity_manifest(str(new))


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    held: list[weakref.ref[torch.Tensor]] = []
    most = 0
    read = rewrite.Source.read

    def watched(self: Any, name: str, make: Any = None) -> Any:
        nonlocal most
        value = read(self, name, make)
        if isinstance(value, torch.Tensor):
            held.append(weakref.ref(value))
            most = max(most, sum(reference() is not None for reference in held))
        return value

    monkeypatch.setattr(rewrite.Source, "read", watched)
    checkpoint_convert.convert(save_former(tmp_path / "old"), tmp_path / "new")
    assert len(held) >= len(today())
    assert most <= 2  # the one that is being written is let go when the next is there


def refused(old: Path, new: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says as it refuses; it leaves nothing of ``new``."""
    was = new.exists()
    assert cli.main(["checkpoint", "convert", str(old), str(new)]) == cli.USER_ERROR
    assert new.exists() == was
    assert not new.with_name(f"{new.name}.partial").exists()
    return capsys.readouterr().err


def test_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    says = refused(tmp_path / "nothing", tmp_path / "new", capsys)
    assert f"{tmp_path}/nothing is no checkpoint" in says
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "latest_checkpointed_iteration.txt").write_text("7")
    assert f"{tmp_path}/empty/iter_0000007" in refused(tmp_path / "empty", tmp_path / "new", capsys)
    (tmp_path / "empty" / "iter_0000007" / "mp_rank_00").mkdir(parents=True)
    says = refused(tmp_path / "empty", tmp_path / "new", capsys)
    assert "in the format torch" in says
    assert "--ckpt-convert-format torch_dist" in says


def test_new_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "new").mkdir()
    says = refused(save_former(tmp_path / "old"), tmp_path / "new", capsys)
    assert f"{tmp_path}/new is there already" in says


def test_todays_layout_needs_no_conversion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = save_former(tmp_path / "old", content={**CONTENT, "megacpp_layout": 2})
    says = refused(old, tmp_path / "new", capsys)
    assert f"{old}/iter_0000030 is in layout 2 already" in says


def test_flat_buckets_have_no_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def as_buckets(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("optimizer.")]:
            del tensors[name]
        tensors["optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_0.bucket_idx_0.exp_avg"] = torch.zeros(9)

    content = {**CONTENT, "distrib_optim_sharding_type": "dp_reshardable"}
    says = refused(save_former(tmp_path / "old", as_buckets, content), tmp_path / "new", capsys)
    assert "flat buckets (optimizer.distributed.dp_group_idx_0" in says
    assert "--dist-ckpt-optim-fully-reshardable" in says
    assert "--no-save-optim" in says


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{MAMBA}in_proj.weight", (HEADS * (2 * P + 3) + 1, D)),
        (f"{MAMBA}in_proj.weight", (HEADS * (2 * P + 4), D)),
        (f"{MAMBA}bc_proj.weight", (2 * GROUPS * RANK * N - 2, D)),
        (f"{MAMBA}b_bias", (HEADS * RANK * N,)),
        (f"optimizer.state.exp_avg.{RECURRENT}in_proj.weight", (R_HEADS * 2 * V, D)),
        (f"{RECURRENT}qk_weight", (2 * K + 1, D)),
        (f"{MAMBA}angle_weight", None),
    ],
)
def test_shapes_of_no_model(
    name: str, shape: tuple[int, ...] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]
        if shape is not None:
            tensors[name] = torch.zeros(shape)

    says = refused(save_former(tmp_path / "old", change), tmp_path / "new", capsys)
    stem = name[: name.index("self_attention.")] + "self_attention."
    assert f"{tmp_path}/old/iter_0000030: {stem}* is no layer of megacpp-mcore 0.1.0" in says
    if shape is not None:
        assert f"{name.removeprefix(stem)} {list(shape)}" in says


def test_damage_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_former(tmp_path / "old") / "iter_0000030"
    (data,) = folder.glob("*.distcp")
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2])
    assert f"{folder} cannot be rewritten to {tmp_path}/new" in refused(tmp_path / "old", tmp_path / "new", capsys)
    data.unlink()
    assert f"{folder} has no common state" in refused(tmp_path / "old", tmp_path / "new", capsys)
    (folder / ".metadata").write_bytes(b"no pickle")
    assert f"{folder}/.metadata cannot be read" in refused(tmp_path / "old", tmp_path / "new", capsys)


def test_the_command_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = save_former(tmp_path / "old")
    capsys.readouterr()
    assert cli.main(["checkpoint", "convert", str(old), str(tmp_path / "new")]) == 0
    output = capsys.readouterr()
    assert output.out.splitlines() == [
        f"{tmp_path}/new/iter_0000030: 2 M and R layers, 44 tensors changed",
        "its definition (MEGACPP_CONFIG) needs, under overrides: mamba3: {out_norm: false}",
    ]
    assert output.err == ""


def test_metadata_of_a_save_is_marked_and_that_of_a_load_is_checked() -> None:
    metadata: dict[str, Any] = {"dp_cp_group": None}
    checkpoint_layout.mark_or_check(metadata, None)
    assert metadata == {"dp_cp_group": None, "megacpp_layout": 2}
    checkpoint_layout.mark_or_check(metadata, "megacpp_mcore")
    assert metadata["megacpp_experts"] == "megacpp_mcore"
    checkpoint_layout.mark_or_check(None, None)
    checkpoint_layout.mark_or_check({"megacpp_loaded_from": "/old", "megacpp_layout": 2}, None)
    with pytest.raises(CheckpointError, match=r"`megacpp-mcore checkpoint convert /old NEW`"):
        checkpoint_layout.mark_or_check({"megacpp_loaded_from": "/old"}, None)
    with pytest.raises(CheckpointError, match="has megacpp_layout 3, expected 2"):
        checkpoint_layout.mark_or_check({"megacpp_loaded_from": "/old", "megacpp_layout": 3}, None)


def test_flat_state_in_the_order_of_other_experts_is_refused() -> None:
    loaded = {"megacpp_loaded_from": "/old", "megacpp_layout": 2}
    flat = loaded | {"distrib_optim_sharding_type": "dp_reshardable"}
    with pytest.raises(
        CheckpointError, match=r"backends: \{experts: stock\}, or save it so once with --dist-ckpt-optim"
    ):
        checkpoint_layout.mark_or_check(flat, "megacpp_mcore")
    checkpoint_layout.mark_or_check(flat, "stock")
    checkpoint_layout.mark_or_check(flat | {"megacpp_experts": "megacpp_mcore"}, "megacpp_mcore")
    checkpoint_layout.mark_or_check(loaded | {"distrib_optim_sharding_type": "fully_reshardable"}, "megacpp_mcore")
    without = SimpleNamespace(no_load_optim=True, finetune=False)
    with mock.patch("megatron.training.global_vars._GLOBAL_ARGS", without):
        checkpoint_layout.mark_or_check(flat, "megacpp_mcore")


def test_a_folder_is_noted_where_its_metadata_is_read(tmp_path: Path) -> None:
    from megatron.core import dist_checkpointing

    from megacpp_mcore.patches import checkpoint_layout as patch
    from tests import stock

    folder = save_former(tmp_path / "old") / "iter_0000030"
    with stock.patched(patch.PATCH):
        state = dist_checkpointing.load_common_state_dict(str(folder))
        metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=state)
    assert metadata == {**CONTENT, "megacpp_loaded_from": str(folder)}
    assert dist_checkpointing.load_common_state_dict(str(folder))["content_metadata"] == CONTENT
