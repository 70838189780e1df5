"""The tables of a profile, from records made by hand: where time belongs, what was hidden, and what was waited for."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacpp_mcore.commands import cli
from megacpp_mcore.observe.profile.table import collective, is_communication, page, table
from megacpp_mcore.observe.profile.trace import (
    BACKWARD,
    FORWARD,
    NODE,
    OPTIMIZER,
    RECOMPUTE,
    Attribution,
    Kernel,
    Op,
    Place,
    Trace,
    read,
)  # fmt: skip
from megacpp_mcore.util.intervals import Cover

MAIN, ENGINE = 11, 12
"""Two threads of the host."""

_intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


@given(_intervals, _intervals)
def test_a_cover_counts_every_instant_once(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    left, right = ({at for start, end in intervals for at in range(start, end)} for intervals in (one, other))
    cover = Cover(one)
    assert cover.total == len(left)
    assert cover.common(Cover(other)) == len(left & right)
    assert [cover.holds(at) for at in range(42)] == [at in left for at in range(42)]
    for start, end in other:
        assert cover.within(start, end) == len(left & set(range(start, end)))


class Host:
    """Writes events of a host thread as nested calls, a nanosecond each between begin, calls, and end."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._now = itertools.count(1)

    def run(self, name: str, *inner: Any, thread: int = MAIN, sequence: int = -1, made_by: int = 10) -> Any:
        """An event to be written by :meth:`write`, with what is called in it."""
        op = Op(0, 0, name, thread, thread - 10, sequence, made_by - 10)
        return op, inner

    def write(self, *events: Any) -> None:
        """Write events one after the other."""
        for op, inner in events:
            place, start = len(self.ops), next(self._now)
            self.ops.append(op)
            self.write(*inner)
            self.ops[place] = op._replace(start_ns=start, end_ns=next(self._now), correlation=place + 1)


def places(host: Host) -> dict[str, Place]:
    """The place of every operator, by its name."""
    placed = Attribution(Trace(ops=list(reversed(host.ops))))
    return {op.name: placed.operators[op.correlation] for op in host.ops if op.correlation in placed.operators}


def test_a_node_belongs_where_it_was_made_and_the_sum_of_gradients_to_the_node_before() -> None:
    host = Host()
    run = host.run
    host.write(
        run(
            "megacpp::step/1",
            run("megacpp::A/1", run("a", sequence=7), run("a view", sequence=8)),
            run("megacpp::E/2", run("e outer", run("e inner", sequence=9), sequence=8)),
            run("loss", sequence=10),
            run(NODE + "Loss", run("l back"), sequence=10, made_by=MAIN),
            run(NODE + "E inner", run("e1 back"), sequence=9, made_by=MAIN),
            run(NODE + "E outer", run("e0 back"), sequence=8, made_by=MAIN),
            run(NODE + "torch::autograd::AccumulateGrad", run("e grad")),
            run(NODE + "A", run("a back"), sequence=7, made_by=MAIN),
            run(NODE + "torch::autograd::AccumulateGrad", run("megacpp::gradients", run("reduce")), run("a grad")),
            run("megacpp::optimizer", run("update")),
        )
    )
    place = places(host)
    assert place["a"] == place["a view"] == ("A/1", FORWARD)
    assert place["e outer"] == place["e inner"] == ("E/2", FORWARD)
    assert place["loss"].label is None
    assert place["l back"] == (None, BACKWARD)
    assert place["e1 back"] == place["e0 back"] == place["e grad"] == ("E/2", BACKWARD)
    assert place["a back"] == place["a grad"] == ("A/1", BACKWARD)
    assert place["reduce"] == ("gradients", BACKWARD)
    assert place["update"] == ("optimizer", OPTIMIZER)


def test_numbers_are_those_of_the_thread_that_made_the_node() -> None:
    host = Host()
    run = host.run
    host.write(run("megacpp::step/1", run("megacpp::M/1", run("m", sequence=3))))
    host.write(run("megacpp::A/9", run("a", sequence=3, thread=ENGINE), thread=ENGINE))
    host.write(
        run("megacpp::step/2"),
        run(NODE + "M", run("m back", thread=ENGINE), sequence=3, made_by=MAIN, thread=ENGINE),
        run(NODE + "A", run("a back", thread=ENGINE), sequence=3, made_by=ENGINE, thread=ENGINE),
    )
    host.ops = [op._replace(end_ns=100) if op.name == "megacpp::step/2" else op for op in host.ops]
    place = places(host)
    assert place["m back"].label == "M/1"
    assert place["a back"].label == "A/9"
    assert "a" not in place  # it lies between the steps


def test_what_is_computed_again_is_known_and_belongs_where_it_was() -> None:
    host = Host()
    run = host.run
    full = run(  # Megatron's own recompute of a whole layer enters the layer again
        NODE + "CheckpointFunctionBackward",
        run("restore"),
        run("megacpp::M/1", run("again", run("again inner"), sequence=7)),
        run(NODE + "Again", run("again back"), sequence=7, made_by=MAIN),
        sequence=1,
        made_by=MAIN,
    )
    part = run(  # ours computes a part of a layer again, inside of it
        NODE + "CheckpointFunctionBackward",
        run("part again", run("part again inner"), sequence=6),
        run(NODE + "Part", run("part back"), run("part no graph"), sequence=6, made_by=MAIN),
        run(NODE + "torch::autograd::AccumulateGrad", run("part grad")),
        sequence=2,
        made_by=MAIN,
    )
    host.write(
        run(
            "megacpp::step/1",
            run("megacpp::block", run("CheckpointFunction", run("megacpp::M/1", run("first")), sequence=1)),
            run("megacpp::R/2", run("CheckpointFunction", run("part first"), sequence=2)),
            part,
            run(NODE + "torch::autograd::AccumulateGrad", run("after part")),
            full,
        )
    )
    place = places(host)
    assert place["first"] == ("M/1", FORWARD)
    assert place["again"] == place["again inner"] == ("M/1", RECOMPUTE)
    assert place["again back"] == ("M/1", BACKWARD)
    assert place["restore"] == ("block", BACKWARD)
    assert place["part first"] == ("R/2", FORWARD)
    assert place["part again"] == place["part again inner"] == ("R/2", RECOMPUTE)
    for name in ("part back", "part no graph", "part grad", "after part"):
        assert place[name] == ("R/2", BACKWARD), name


def test_self_time_leaves_out_what_an_operator_calls_and_the_rest_is_in_no_operator() -> None:
    host = Host()
    run = host.run
    host.write(
        run("before"),
        run("megacpp::step/1", run("megacpp::A/1", run("outer", run("inner"), run("megacpp::M/2", run("deep"))))),
        run("between"),
        run("megacpp::step/2", run("two"), run("megacpp::A/1")),
    )
    profile = table(Trace(ops=host.ops))
    by_name = {operator["name"]: operator["ns"] for row in profile["families"].values() for operator in row["top"]}
    assert by_name == {"outer": 7 - 1 - 3, "inner": 1, "deep": 1, "two": 1}
    assert profile["total_ns"] == sum(by_name.values())
    assert profile["window_ns"] == 11 + 5
    assert profile["no_operator_ns"] == profile["window_ns"] - profile["total_ns"]
    assert (profile["host_bound_share"], profile["busy_ns"]) == (None, None)


ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def device_trace(kernels: Sequence[tuple[int, int, str, str]], steps: Sequence[tuple[int, int]] = ((0, 100),)) -> Trace:
    """A trace of kernels ``(start, end, name, label)``, each launched in a range of that label."""
    trace = Trace()
    for number, (start, end) in enumerate(steps, start=1):
        trace.ops.append(Op(start, end, f"megacpp::step/{number}", correlation=900 + number))
    at = steps[0][0] + 1
    for number, (start, end, name, label) in enumerate(kernels, start=1):
        if label:
            trace.ops.append(Op(at, at + 3, f"megacpp::{label}", correlation=1000 + number))
        trace.ops.append(Op(at + 1, at + 2, "op", correlation=number))
        trace.kernels.append(Kernel(start, end, name, number, 5000 + number))
        at += 4
    return trace


def page_of(trace: Trace, device: str) -> str:
    header = {"steps": [1, 1], "rank": 3, "device": device, "phase": "steady", "phase_why": "-"}
    return page(table(trace) | header)


def test_communication_is_hidden_only_where_another_stream_computes() -> None:
    kernels = [(10, 30, "gemm", "M/1"), (40, 50, "gemm", "A/2")]
    kernels += [(20, 45, ALL_REDUCE, "gradients")]  # hidden in 20–30 and 40–45
    kernels += [(60, 70, SEND, "pipeline"), (65, 75, SEND, "pipeline")]  # exposed, half of it at the same time
    profile = table(device_trace(kernels))
    gradients, pipeline = (profile["families"][name] for name in ("gradients", "pipeline"))
    assert (gradients["communication_hidden_ns"], gradients["communication_exposed_ns"]) == (15, 10)
    assert (pipeline["communication_hidden_ns"], pipeline["communication_exposed_ns"]) == (0, 20)
    assert (profile["communication_ns"], profile["hidden_ns"]) == (25 + 15, 15)
    assert gradients["top"] == [{"name": "AllReduce", "ns": 25, "calls": 1}]
    assert pipeline["top"] == [{"name": "SendRecv", "ns": 20, "calls": 2}]
    assert gradients["kernels"] == 1
    assert profile["bubble_ns"] == 15  # from 60 to 75


def test_sending_and_receiving_is_an_all_to_all_where_no_stages_do_it() -> None:
    kernels = [(10, 20, "gemm", "E/2"), (15, 40, SEND, "E/2"), (50, 60, SEND, "pipeline"), (70, 75, SEND, "")]
    profile = table(trace := device_trace(kernels))
    assert profile["collectives"] == {
        "AllToAll": {"calls": 1, "ns": 25, "exposed_ns": 20},
        "SendRecv": {"calls": 2, "ns": 15, "exposed_ns": 15},
    }
    assert profile["bubble_ns"] == 10
    bubble = "pipeline bubble (waiting for another stage): 0.000 ms, 10.0% of the step"
    assert bubble in page_of(trace, "H200").splitlines()


def test_the_command_prints_the_table_of_rank_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, label in ((0, "A/1"), (2, "M/3")):
        header = {"steps": [7, 8], "rank": rank, "device": "H200", "phase": "steady", "phase_why": "-"}
        folder = tmp_path / "profile" / "7-8" / (f"rank_{rank:05d}" if rank else "")
        folder.mkdir(parents=True)
        profile = table(device_trace([(10_000_000, 30_000_000, "gemm", label)], [(0, 100_000_000)]))
        (folder / "table.json").write_text(json.dumps(profile | header))
    (tmp_path / "start_0").mkdir()
    assert cli.main(["report", "profile", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("profile of steps 7 to 8, rank 0, H200")
    assert [line.split()[:2] for line in lines if line.startswith(("A/1", "M/3"))] == [["A/1", "10.000"]]
    shutil.rmtree(tmp_path / "profile")
    assert cli.main(["report", "profile", str(tmp_path)]) == 2
    assert "holds no profile of rank 0; launch with --profile" in capsys.readouterr().err


def test_the_device_waits_where_no_kernel_runs_and_simultaneous_ones_count_once() -> None:
    profile = table(device_trace([(10, 40, "a", "A/1"), (20, 50, "b", "M/2"), (90, 120, "c", "R/3")]))
    assert profile["window_ns"] == 120  # to the end of the last kernel
    assert profile["busy_ns"] == 40 + 30
    assert profile["host_bound_share"] == pytest.approx(50 / 120)
    assert profile["total_ns"] == 90  # a family's kernels count in full, even if others overlap them
    assert profile["attributed_share"] == 1


def test_what_belongs_nowhere_is_said_and_what_lies_between_steps_is_left_out() -> None:
    trace = device_trace([(10, 20, "a", "A/1"), (20, 25, "lost", "")], steps=((0, 50), (80, 100)))
    trace.kernels.append(Kernel(30, 40, "of no operator", 0, 7000))
    trace.kernels.append(Kernel(60, 70, "evaluation", 0, 7001))
    profile = table(trace)
    assert profile["families"]["unattributed"]["total_ns"] == 15
    assert profile["total_ns"] == 25
    assert profile["attributed_share"] == pytest.approx(10 / 25)
    assert profile["dominant"] == "A"
    assert profile["window_ns"] == 70


def test_a_kernel_belongs_where_it_was_launched_when_that_is_more_than_its_operator_says() -> None:
    """A checkpoint is an operator with ranges inside; Transformer Engine's GEMMs in them are no operators of torch."""
    trace = Trace(
        ops=[
            Op(0, 100, "megacpp::step/1", correlation=1),
            Op(5, 90, "megacpp::block", correlation=2),
            Op(6, 80, "CheckpointFunction", correlation=3, sequence=1),
            Op(10, 40, "megacpp::M/4", correlation=4),
            Op(20, 21, "cudaLaunchKernel", correlation=77, launch=True),
        ],
        kernels=[Kernel(30, 60, "gemm", 3, 77), Kernel(60, 70, "copy", 3, 78)],
    )
    profile = table(trace)
    assert profile["layers"]["M/4"]["forward_ns"] == 30
    assert profile["layers"]["block"]["forward_ns"] == 10  # its launch is not known, its operator is
    assert profile["families"]["block"]["host_ns"] > 0


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (ALL_REDUCE, "AllReduce"),
        (SEND, "SendRecv"),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_float(ncclWorkElem)", "ReduceScatter"),
        ("ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs)", "AllGather"),
        ("ncclDevKernel_Generic_AllReduce(x)", "AllReduce"),
        ("Memcpy PtoP (Device -> Device)", "Memcpy PtoP (Device -> Device)"),
        ("Memcpy DtoD (Device -> Device)", ""),
        ("reduce_kernel", ""),
    ],
)
def test_a_collective_has_its_name_and_computation_none(kernel: str, name: str) -> None:
    assert is_communication(kernel) is bool(name)
    assert collective(kernel) == name or not name


GPU_WORDS = ("stream", "kernel", "the device", "host-bound", "comm exp.", "comm hid.")


def test_a_page_speaks_of_what_its_device_has() -> None:
    named = ((0, 100, "megacpp::step/1"), (5, 50, "megacpp::A/1"), (10, 40, "aten::mm"))
    host = Trace(ops=[Op(*op, correlation=number) for number, op in enumerate(named, 1)])
    on_cpu = page_of(host, "CPU")
    assert [word for word in GPU_WORDS if word in on_cpu] == []
    assert "communication" not in on_cpu
    assert "not in any operator (Python, waiting): 0.000 ms, 70.0% of the step\n" in on_cpu
    kernels = [(10, 40, "gemm", "M/1"), (40, 60, ALL_REDUCE, "gradients"), (60, 70, "x", "")]
    on_gpu = page_of(device_trace(kernels), "H200")
    assert [word for word in GPU_WORDS if word not in on_gpu] == []
    assert "any operator" not in on_gpu  # the host-bound share is what a device's rows lack
    assert "dominant: M, 50.0%; 83.3% of the kernels' time" in on_gpu
    assert "host-bound share: 40.0% (the device had nothing to do)" in on_gpu
    assert "\nunattributed: " in on_gpu
    silent = page_of(host, "H200")  # the profiler got no kernels from the device
    assert "host-bound share: not measured" in silent
    assert "nothing was recorded" in page_of(Trace(), "H200")


class Event:
    """One of the profiler's events: its methods return what was given."""

    def __init__(self, name: str, **values: Any) -> None:
        from torch.autograd import DeviceType

        attributes = {
            "name": name, "start_ns": 5, "duration_ns": 10, "device_type": DeviceType.CPU, "device_index": 0,
            "device_resource_id": 42, "start_thread_id": 1, "end_thread_id": values.get("start_thread_id", 1),
            "sequence_nr": -1, "fwd_thread_id": 0, "scope": 0, "correlation_id": 0, "linked_correlation_id": 0,
            "is_user_annotation": False, "is_async": False,
        } | values  # fmt: skip
        for method, value in attributes.items():
            setattr(self, method, lambda value=value: value)


def test_events_of_the_profiler_become_records() -> None:
    from torch.autograd import DeviceType

    on_device = {"device_type": DeviceType.CUDA, "device_resource_id": 7}
    trace = read(
        [
            Event("aten::mm", correlation_id=3, sequence_nr=9),
            Event("MmBackward0", sequence_nr=9, fwd_thread_id=1, scope=1),
            Event("cudaLaunchKernel", correlation_id=70, linked_correlation_id=3),
            Event("cudaStreamIsCapturing", correlation_id=71),
            Event("gemm", correlation_id=70, linked_correlation_id=3, **on_device),
            Event("megacpp::A/1", is_user_annotation=True, **on_device),
            Event("gloo:all_reduce", is_async=True, end_thread_id=8),
            Event("unknown", is_async=True),
        ]
    )
    assert trace.kernels == [Kernel(5, 15, "gemm", 3, 70)]
    assert [op.name for op in trace.ops] == ["aten::mm", "MmBackward0", "cudaLaunchKernel"]
    assert [(op.sequence, op.forward) for op in trace.ops] == [(9, True), (9, False), (-1, True)]
    assert [op.launch for op in trace.ops] == [False, False, True]
