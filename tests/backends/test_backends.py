"""The backend dispatcher: requested against observed, never a silent fall-back."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megacpp_mcore import backends, versions
from megacpp_mcore.backends import Candidate, Dim, Dispatcher, ProbeResult, Speed, Support, built, markdown, probes
from megacpp_mcore.backends import candidates as listed
from megacpp_mcore.backends import dispatcher as dispatching
from megacpp_mcore.backends.candidates import LAYER_PARTS, layer_parts_candidates
from megacpp_mcore.commands import doctor
from megacpp_mcore.errors import BackendError
from tests.errors import raises


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset warnings, probes and disabled backends as in a new process."""
    monkeypatch.delenv(probes.DISABLE_TE, raising=False)
    cached = probes._probed, probes.triton_release, dispatching._warn_once
    for cache in cached:
        cache.cache_clear()
    yield
    for cache in cached:
        cache.cache_clear()


class Counted:
    """A candidate's two functions, counting their calls, and its largest head dimension."""

    def __init__(self, *, present: bool = True, covers: int = 128, loads: bool = True) -> None:
        self.present, self.covers, self.loads = present, covers, loads
        self.probes = self.loaded = 0

    def probe(self) -> ProbeResult:
        self.probes += 1
        return ProbeResult(self.present, "" if self.present else "no such device")

    def load(self) -> Callable[..., Any]:
        self.loaded += 1
        if not self.loads:
            raise ImportError("undefined symbol")
        return self.covers.__add__

    def candidate(self, name: str, speed: Speed, op: str = "mla", devices: tuple[str, ...] = ("cpu",)) -> Candidate:
        support = Support(devices=devices, dims={"head_dim": Dim(largest=self.covers)})
        return Candidate(name=name, op=op, speed=speed, load=self.load, probe=self.probe, support=support)


def test_kernels_for_other_gpus_are_left_to_requests_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = Counted(), Counted(covers=10**9)
    kernel = fast.candidate("fast", Speed.KERNEL, devices=("cuda",))
    archs = {"sm_90": "", "sm_100": "", "sm_80": "spills"}
    kernel = dataclasses.replace(kernel, support=dataclasses.replace(kernel.support, archs=archs))
    both = (kernel, slow.candidate("slow", Speed.REFERENCE, devices=("cpu", "cuda")))
    for arch, expected in (("sm_90", "fast"), ("sm_100", "fast"), (None, "fast"), ("sm_86", "slow"), ("sm_80", "slow")):
        monkeypatch.setattr(probes, "arch", lambda arch=arch: arch)
        made = Dispatcher(candidates=both).request("mla", device="cuda", head_dim=64)
        assert (made.observed, made.slower_than_best) == (expected, expected == "slow")
        lacking = Dispatcher(candidates=both).without_kernel("mla", device="cuda", head_dim=64)
        assert (lacking is None) == (expected == "fast")
        if expected == "slow":
            worst = "spills" if arch == "sm_80" else "none was compiled for it"
            assert f"its kernels are for sm_90, sm_100, and this GPU is {arch}: {worst}" in made.reason
    assert Dispatcher({"mla": "fast"}, both).request("mla", device="cuda", head_dim=64).observed == "fast"
    (row, _) = markdown.rows(both)
    assert (row["archs"], row["present"]) == (["sm_90", "sm_100"], True)
    assert "by name only" in markdown.text(both)


@pytest.mark.parametrize("release", [*versions.TRITON, "3.10"])
def test_kernels_are_taken_with_the_triton_that_compiles_them(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``auto`` where they do not spill registers, by name wherever they compile."""
    triton = ModuleType("triton")
    triton.__version__ = f"{release}.1"  # type: ignore[attr-defined]
    target = SimpleNamespace(get_current_target=lambda: "an H200")
    triton.runtime = SimpleNamespace(driver=SimpleNamespace(active=target))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(probes, "probe_import", lambda name: ProbeResult(True))
    monkeypatch.setattr(probes, "arch", lambda: "sm_90")
    monkeypatch.setattr(probes, "REQUIREMENTS", {**probes.REQUIREMENTS, probes.CUDA: lambda: ProbeResult(True)})
    monkeypatch.setattr(listed, "_load", lambda path: int)
    (component,) = (part for part in doctor.COMPONENTS if part.name == "triton")
    names: dict[str, Any] = {"details": {}}
    with pytest.raises(SystemExit) if release == "3.10" else contextlib.nullcontext():
        exec(component.probe, names)  # noqa: S102 - as the doctor does, in a process of its own
    assert names["version"] == f"{release}.1"
    assert ("on GPUs they ran with Triton 3.6 only" in names["details"]["note"]) == (release not in ("3.6", "3.10"))
    for state, rank in ((64, 4), (128, 1), (128, 4)):
        needs = {"device": "cuda", "dtype": "bfloat16", "head_dim": 64, "mimo_rank": rank, "state": state}
        answer = Dispatcher().request("mamba3", **needs)
        spills = versions.TRITON.get(release, {}).get("mamba3") == {"mimo_rank": rank, "state": state}
        assert answer.observed == ("reference" if spills or release == "3.10" else "triton"), answer.reason
        assert answer.slower_than_best == (answer.observed == "reference")
        if spills:
            assert f"with Triton {release} its kernels spill registers at mimo_rank 4, state 128" in answer.reason
        if release == "3.10":
            assert f"not compiled with Triton 3.10, but with {', '.join(versions.TRITON)}" in answer.reason
            with raises(BackendError, "mamba3", "Triton 3.10", code="cannot-run"):
                Dispatcher({"mamba3": "triton"}).request("mamba3", **needs)
        else:
            assert Dispatcher({"mamba3": "triton"}).request("mamba3", **needs).observed == "triton"


def dispatcher(requests: Mapping[str, str] | None = None, **fast: Any) -> tuple[Dispatcher, Counted]:
    kernel = Counted(**fast)
    candidates = [Counted(covers=10**9).candidate("slow", Speed.REFERENCE), kernel.candidate("fast", Speed.KERNEL)]
    return Dispatcher(requests, candidates), kernel


def test_auto_takes_the_fastest_and_probes_once() -> None:
    made, kernel = dispatcher()
    answers = [made.request("mla", layer=layer, head_dim=64) for layer in (1, 2, 1)]
    assert {answer.observed for answer in answers} == {"fast"}
    assert answers[0] is answers[2]
    assert answers[0].fn(1) == 129
    assert (kernel.probes, kernel.loaded) == (1, 2)
    assert [row["layer"] for row in made.observed_backends()] == [1, 2]


def test_auto_does_not_take_what_runs_by_name_alone() -> None:
    exact = Counted().candidate("exact", Speed.COMPILED)
    rough = dataclasses.replace(Counted().candidate("rough", Speed.KERNEL), auto=False)
    made = Dispatcher({}, [rough, exact])
    answer = made.request("mla")
    assert (answer.observed, answer.slower_than_best) == ("exact", False)
    assert made.request("mla", "rough").observed == "rough"
    with raises(BackendError, "mla", code="none-runs"):
        Dispatcher({}, [rough]).request("mla")


def test_auto_takes_another_package_only_at_sizes_of_rows() -> None:
    ours = Counted(covers=10**9).candidate("ours", Speed.KERNEL)
    row = Support(dims={"head_dim": Dim(one_of=(64,))})
    other = dataclasses.replace(Counted().candidate("theirs", Speed.KERNEL), auto=row)
    made = Dispatcher({}, [other, ours])
    answer = made.request("mla", head_dim=64)
    assert (answer.observed, answer.reason) == ("theirs", "fastest available")
    answer = made.request("mla", head_dim=32)
    assert (answer.observed, answer.slower_than_best) == ("ours", False)
    assert answer.reason == "theirs was not measured to be faster here: head_dim 32 is not one of 64; the nearest is 64"
    assert made.request("mla", "theirs", head_dim=32).observed == "theirs"
    probed = Counted()
    other = dataclasses.replace(probed.candidate("theirs", Speed.KERNEL), auto=row)
    made = Dispatcher({}, [other, ours])
    assert made.without_kernel("mla", head_dim=32) is None
    assert made.request("mla", head_dim=32).observed == "ours"
    assert probed.probes == 0  # a probe may compile kernels
    assert Dispatcher({}, [other]).without_kernel("mla", head_dim=32) == "it has none"


LACKING = [
    ({"present": False}, {}, "fast is not available: no such device"),
    ({}, {"head_dim": 256}, "fast does not support this call: head_dim 256 > 128"),
    ({"loads": False}, {}, "undefined symbol"),
]


@pytest.mark.parametrize(("fast", "needs", "reason"), LACKING)
def test_auto_on_less_than_the_best_is_marked_and_warned_of_once_in_a_process(
    fast: dict[str, Any], needs: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    made, _ = dispatcher(**fast)
    answers = [made.request("mla", layer=layer, device="cpu", **needs) for layer in (1, 2, 3)]
    answers.append(dispatcher(**fast)[0].request("mla", device="cpu", **needs))
    assert {(answer.observed, answer.slower_than_best) for answer in answers} == {("slow", True)}
    assert reason in answers[0].reason
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert reason in caplog.text
    if not fast:
        assert made.request("mla", layer=4, head_dim=64).slower_than_best is False


def test_a_kernel_of_another_device_is_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    fast, slow = Counted(present=False), Counted()
    made = Dispatcher(
        candidates=[fast.candidate("fast", Speed.KERNEL, devices=("cuda",)), slow.candidate("slow", Speed.REFERENCE)]
    )
    answer = made.request("mla", device="cpu")
    assert (answer.observed, answer.slower_than_best, answer.reason) == ("slow", False, "fast is for cuda")
    assert (caplog.records, fast.probes) == ([], 0)
    with raises(BackendError, "mla", "no such device", "slow is for cpu", code="none-runs"):
        made.request("mla", device="cuda")


@pytest.mark.parametrize(("fast", "needs", "reason"), LACKING)
def test_by_name_runs_or_fails_with_the_reason(fast: dict[str, Any], needs: dict[str, Any], reason: str) -> None:
    by_mapping, _ = dispatcher({"mla": "fast"}, **fast)
    by_argument, _ = dispatcher(**fast)
    for ask in (
        lambda: by_mapping.request("mla", layer=7, **needs),
        lambda: by_argument.request("mla", "fast", layer=7, **needs),
    ):
        with raises(BackendError, "'fast'", "op mla", "layer 7", reason.rpartition(": ")[2], code="cannot-run"):
            ask()
    assert by_argument.observed_backends() == []


def test_mapping_and_argument() -> None:
    made, _ = dispatcher({"mla": "slow"})
    assert made.request("mla").observed == "slow"
    assert made.request("mla", "fast").observed == "fast"
    assert made.request("mla", "auto").observed == "fast"
    rows = json.loads(json.dumps(made.observed_backends()))
    assert [(row["requested"], row["observed"], row["speed"]) for row in rows] == [
        ("slow", "slow", "reference"),
        ("fast", "fast", "kernel"),
        ("auto", "fast", "kernel"),
    ]


def test_a_better_one_is_taken_in_place_of_autos_only() -> None:
    def kernel(name: str, auto: bool = True) -> Candidate:
        return Candidate(name=name, op="mla", speed=Speed.KERNEL, load=lambda: abs, auto=auto)

    many = [kernel("plain"), kernel("better", auto=False), kernel("other")]
    for requests, better, runs, requested in (
        ({}, "better", "better", "auto"),
        ({}, None, "plain", "auto"),
        ({"mla": "plain"}, "better", "plain", "plain"),
        ({"mla": "other"}, "better", "other", "other"),
    ):
        made = Dispatcher(requests, many)
        answer = made.request_in_place("mla", "plain", better, "memory is free", layer=3, head_dim=64)
        assert (answer.observed, answer.requested, answer.layer) == (runs, requested, 3)
        assert (answer.reason == "memory is free") == (runs == "better")
        assert made.observed_backends() == [answer.as_record()]


def test_names_that_do_not_exist() -> None:
    for requests, values in (
        ({"mla": "fastt"}, ["op mla", "'fastt'", "'fast'"]),
        ({"mlaa": "fast"}, ["'mlaa'", "'mla'"]),
    ):
        with raises(BackendError, *values):
            dispatcher(requests)
    with raises(BackendError, "op mla", "'xyz'", "auto, slow, fast"):
        dispatcher()[0].request("mla", "xyz")
    candidate = Counted().candidate("one", Speed.KERNEL)
    with raises(BackendError, "op mla", "'one'", code="taken"):
        Dispatcher(candidates=[candidate, candidate])
    with raises(BackendError, "op linear", "--transformer-impl", code="not-by-name"):
        Dispatcher({"linear": "local"})
    with raises(BackendError, "backend x", "'tritn'", "'triton'"):
        Candidate(name="x", op="mla", speed=Speed.KERNEL, load=lambda: abs, requires=("tritn",))


def test_a_probe_that_raises_is_an_answer() -> None:
    def probe() -> ProbeResult:
        raise OSError("libcuda.so.1")

    made = Dispatcher(candidates=[Candidate(name="a", op="x", speed=Speed.KERNEL, load=lambda: abs, probe=probe)])
    with raises(BackendError, "libcuda.so.1", code="cannot-run"):
        made.request("x", "a")


def test_apex_parts_are_probed_and_an_impostor_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "apex.py").write_text("raise SystemExit('an impostor was imported')")
    (tmp_path / "fused_weight_gradient_mlp_cuda.py").write_text("raise RuntimeError('built for another torch')")
    (tmp_path / "torch.py").write_text("")
    code = "from megacpp_mcore.backends import apex_parts; print({k: v.reason for k, v in apex_parts().items()})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"},
    )
    assert "'amp_C': 'amp_C is not installed', 'apex.optimizers': 'it needs amp_C'" in done.stdout
    assert "built for another torch" in done.stdout
    assert tuple(backends.apex_parts()) == backends.APEX_PARTS


@pytest.mark.parametrize(
    ("support", "needs", "reason"),
    [
        (Support(devices=("cuda",)), {"device": "cpu"}, "it runs on cuda, not on cpu"),
        (Support(dtypes=("bfloat16",)), {"dtype": "torch.float32"}, "dtype float32 is not one of bfloat16"),
        (Support(dims={"v_dim": Dim(multiple_of=8)}), {"v_dim": 12}, "v_dim 12 is not a multiple of 8"),
        (Support(dims={"v_dim": Dim(largest=64)}), {"v_dim": 72}, "v_dim 72 > 64"),
        (
            Support(dims={"state": Dim(one_of=(64, 128))}),
            {"state": 96},
            "state 96 is not one of 64, 128; the nearest is 128",
        ),
        (
            Support(combinations=({"a": 1, "b": 2}, {"a": 3, "b": 4})),
            {"a": 1, "b": 4},
            "unsupported combination a 1, b 4; supported: a 1, b 2 or a 3, b 4",
        ),
        (Support(packed=False), {"packed": True}, "it does not keep packed documents apart"),
        (Support(deterministic=False), {"deterministic": True}, "its gradients can differ from run to run"),
        (Support(capturable=False), {"capturable": True}, "a CUDA graph cannot hold it (leave --cuda-graph-impl out)"),
    ],
)
def test_support_says_what_it_lacks_and_nothing_else(support: Support, needs: dict[str, Any], reason: str) -> None:
    assert support.lacking(needs) == reason
    assert Support().lacking(needs) is None
    (name, value), *_ = needs.items()
    if isinstance(value, bool):
        assert support.lacking({name: None}) == reason
        assert support.lacking({name: False}) is None


def test_support_of_several_needs_and_of_an_unknown_one() -> None:
    support = Support(capturable=False, dims={"v_dim": Dim(multiple_of=8)})
    lacking = support.lacking({"capturable": True, "v_dim": 9, "another": 9})
    assert lacking == "a CUDA graph cannot hold it (leave --cuda-graph-impl out); v_dim 9 is not a multiple of 8"
    with raises(BackendError, "pakced=True", "device, dtype, packed"):
        support.lacking({"pakced": True})


@pytest.mark.parametrize(
    ("op", "needs", "name", "function"),
    [
        ("mla", {}, "triton", "attend"),
        ("mla", {"packed": False}, "sdpa", "sdpa_attention"),
        ("mla", {"packed": False, "window": 0}, "sdpa", "sdpa_attention"),
        ("mla", {"packed": False, "window": 4095}, "triton", "attend"),
        ("mla", {"packed": False, "window": 4095, "v_dim": 56}, "sdpa", "sdpa_attention"),
        ("mla", {"packed": None, "deterministic": True}, "triton", "attend"),
        ("mla", {"v_dim": 56}, "sdpa", "sdpa_attention"),
        ("mla", {"device": "cpu"}, "reference", "sdpa is for cuda"),
        ("mla", {"v_dim": 12}, "reference", "sdpa does not support this call: v_dim 12 is not a multiple of 8"),
        (
            "mla",
            {"dtype": "torch.float32"},
            "reference",
            "sdpa does not support this call: dtype float32 is not one of",
        ),
        (
            "mla",
            {"deterministic": True, "v_dim": 56},
            "reference",
            "sdpa does not support this call: its gradients can differ",
        ),
        ("mla", {"deterministic": True, "packed": False}, "triton", "attend"),
        ("mamba3", {"device": "cpu"}, "reference", "triton is for cuda"),
        ("m2rnn", {"device": "cpu"}, "reference", "triton is for cuda"),
        ("sparse_mla", {"deterministic": True}, "triton", "attend"),
        ("sparse_mla", {"v_dim": 32}, "reference", ""),
        ("sparse_mla", {"qk_dim": 576, "v_dim": 512}, "triton", "attend"),
        ("sparse_mla", {"qk_dim": 576}, "reference", ""),
        ("indexer", {"deterministic": True}, "triton", "select"),
        ("indexer", {"dim": 128}, "reference", ""),
        ("indexer_grad", {"deterministic": True}, "triton", "indexer_grad"),
        ("indexer_grad", {"heads": 65}, "reference", ""),
        ("indexer_grad", {"dtype": "torch.float32"}, "reference", ""),
        ("routed_mlp", {"deterministic": True}, "triton", "routed_mlp"),
        ("routed_mlp", {"ffn": 100}, "reference", ""),
        ("grouped_mlp", {"dtype": "torch.float16"}, "reference", ""),
    ],
)
def test_ops_have_kernels_where_they_can(
    monkeypatch: pytest.MonkeyPatch, op: str, needs: dict[str, Any], name: str, function: str
) -> None:
    """Check the kernel's function, or the reason for running the reference."""
    pytest.importorskip("triton")
    working = {name: lambda: ProbeResult(True) for name in (probes.CUDA, probes.TRITON, probes.TRANSFORMER_ENGINE)}
    monkeypatch.setattr(probes, "REQUIREMENTS", working)
    widths = {"qk_dim": 128, "v_dim": 64, "dim": 64, "heads": 32, "hidden": 3584, "ffn": 896}
    call = {"device": "cuda", "dtype": "torch.bfloat16", "packed": True} | widths | needs
    spilling = versions.TRITON.get(probes.triton_release(), {}).get(op)  # with the installed one
    if name == "triton" and spilling and spilling.items() <= call.items():
        name, function = "reference", "spill registers"
    answer = Dispatcher().request(op, **call, capturable=name == "triton")
    fell_back = name == "reference" and "device" not in needs
    assert (answer.observed, answer.slower_than_best) == (name, fell_back)
    assert function in (answer.reason if name == "reference" else answer.fn.__name__)
    assert answer.fn.__module__.endswith(name)


FP8 = {"feed_forward": {"hidden": 3584, "ffn": 18944}, "mamba3_projection": {"hidden": 3584, "outputs": 18432}}


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("feed_forward", "triton_fp8"), ("mamba3_projection", "triton_fp8"),
        ("mamba3_projection", "triton_fp8_gradient_bf16"),
    ],
)  # fmt: skip
def test_fp8_by_name_refuses_by_name(op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Includes a rank's rows that tensor parallelism does not divide evenly, and a GPU that is not Hopper."""
    monkeypatch.setattr(probes, "requirement", lambda name: ProbeResult(True))
    needs, (first, second) = {"device": "cuda", "dtype": "torch.bfloat16", "capturable": True} | FP8[op], FP8[op]
    for capability, changed, why in (
        ((9, 0), {first: 120}, f"{first} 120 is not a multiple of 16"),
        ((9, 0), {second: 2312}, f"{second} 2312 is not a multiple of 16"),
        ((9, 0), {second: 65536}, f"{second} 65536 > 32768"),
        ((9, 0), {"device": "cpu"}, "not on cpu"),
        ((9, 0), {"dtype": "torch.float16"}, "dtype float16 is not one of bfloat16"),
        ((8, 0), {}, "(8, 0), not Hopper"),
    ):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda version=capability: version)
        with raises(BackendError, name, f"op {op}", why, code="cannot-run"):
            Dispatcher({op: name}).request(op, **(needs | changed))


def test_no_triton_is_tried_once_and_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    kernel = Candidate(name="fast", op="mla", speed=Speed.KERNEL, load=lambda: abs, requires=("triton",))
    candidates = [kernel, Counted().candidate("slow", Speed.REFERENCE)]
    answer = Dispatcher(candidates=candidates).request("mla", device="cpu")
    assert (answer.observed, answer.slower_than_best) == ("slow", True)
    assert answer.reason == "fast is not available: triton is not installed"
    monkeypatch.delitem(sys.modules, "triton")
    assert not Dispatcher(candidates=candidates)._probe(kernel).ok
    with raises(BackendError, "'fast'", "op mla", "triton", code="cannot-run"):
        Dispatcher(candidates=candidates).request("mla", "fast")


def test_what_is_named_and_cannot_run_here_is_refused_before_a_layer_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    working = {name: lambda: ProbeResult(True) for name in (probes.TRITON, probes.TRANSFORMER_ENGINE)}
    monkeypatch.setattr(probes, "REQUIREMENTS", working | {probes.CUDA: lambda: ProbeResult(False, "no GPU")})
    Dispatcher({"m2rnn": "auto", "mamba3": "reference"}).check_named()
    with raises(BackendError, "'triton'", "op m2rnn", "no GPU", "auto, reference", code="cannot-run"):
        Dispatcher({"m2rnn": "triton"}).check_named()
    with raises(BackendError, "'te'", "op mla", code="cannot-run"):
        Dispatcher({"mla": "te"}).check_named()
    monkeypatch.setenv(probes.DISABLE_TE, "1")
    Dispatcher({"mla": "te"}).check_named()  # another one runs, and the record says so


def te_dispatcher() -> Dispatcher:
    return Dispatcher(candidates=layer_parts_candidates(transformer_engine=lambda: "te", local=lambda: "local"))


def test_a_named_request_for_transformer_engine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    working = {probes.TRANSFORMER_ENGINE: lambda: ProbeResult(True)}
    monkeypatch.setattr(probes, "REQUIREMENTS", working)
    answer = te_dispatcher().request(LAYER_PARTS, "transformer_engine", device="cuda")
    assert (answer.observed, answer.fn()) == ("transformer_engine", "te")
    monkeypatch.setenv(probes.DISABLE_TE, "1")
    for device in ("cuda", "cpu"):
        answer = te_dispatcher().request(LAYER_PARTS, "transformer_engine", layer=3, device=device)
        record = answer.as_record()
        assert (record["requested"], record["observed"], record["layer"]) == ("transformer_engine", "local", 3)
        assert answer.fn() == "local"
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == [
        "op transformer_impl: requested transformer_engine, running local: MEGACPP_DISABLE_TE=1 disables Transformer Engine"
    ]
    monkeypatch.setenv(probes.DISABLE_TE, "0")
    assert te_dispatcher().request(LAYER_PARTS, "transformer_engine", device="cuda").fn() == "te"


def test_transformer_engine_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {probes.TRANSFORMER_ENGINE: lambda: ProbeResult(False, "transformer_engine is not installed")}
    monkeypatch.setattr(probes, "REQUIREMENTS", missing)
    with raises(BackendError, "'transformer_engine'", "op transformer_impl", "transformer_engine is", code="cannot-run"):
        te_dispatcher().request(LAYER_PARTS, "transformer_engine", device="cuda")
    assert te_dispatcher().request(LAYER_PARTS, "local", device="cuda").fn() == "local"


def test_the_table_has_every_candidate_and_its_data(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {(row["op"], row["name"]): row for row in json.loads(json.dumps(markdown.rows(backends.own_candidates())))}
    assert set(rows) == {(candidate.op, candidate.name) for candidate in backends.own_candidates()}
    assert rows["mla", "sdpa"]["devices"] == ["cuda"]
    assert rows["mla", "sdpa"]["dims"] == {"qk_dim": "× 8", "v_dim": "× 8"}
    broken = Counted(present=False).candidate("broken", Speed.KERNEL)
    assert "no: no such device" in markdown.text([broken])
    doctor_words = argparse.Namespace(backends=True, json=False)
    assert doctor.run(doctor_words) == 0
    output = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert any("sdpa kernel cuda bf16, fp16 qk_dim × 8, v_dim × 8 deterministic" in line for line in lines)
    assert "optimizer is chosen by --optimizer" in output


def test_a_norm_of_mamba_ssm_is_no_fall_back() -> None:
    """Megatron's Mamba-2 takes its gated norm from there for every ``--transformer-impl``; other norms can fall back."""
    layer, names = torch.nn.Module(), ("torch_norm.WrappedTorchNorm", "mamba_mixer.ExtendedRMSNorm")
    layer.layer_number, layer.config = 3, SimpleNamespace(transformer_impl="transformer_engine")
    bases = (
        torch.nn.Identity,
        type("RMSNorm", (torch.nn.Identity,), {"__module__": "mamba_ssm.ops.triton.layernorm_gated"}),
    )
    for where, base in zip(names, bases, strict=True):
        module, _, name = where.partition(".")
        layer.add_module(f"{module}_norm", type(name, (base,), {"__module__": f"megatron.core.{module}"})())
    model = SimpleNamespace(decoder=SimpleNamespace(layers=[layer]), config=layer.config)
    pairs = [(row["requested"], row["observed"]) for row in built._of_classes([model])]
    assert pairs == [("transformer_engine", "local"), ("auto", "local")]
