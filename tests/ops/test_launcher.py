"""Launches that bypass Triton's look-up, against those by Triton: with its compiler, and a driver that only records them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import BaseBackend  # noqa: E402
from triton.runtime.jit import native_specialize_impl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from megacpp_mcore.ops import triton_launch  # noqa: E402
from megacpp_mcore.ops.triton_launch import launch  # noqa: E402
from tests.ops.launching import Driver  # noqa: E402

pytestmark = pytest.mark.skipif(not triton_launch.DIRECT, reason="Triton launches in this version")


@triton.jit(do_not_specialize=["fixed"])
def store(x_ptr, other_ptr, size, fixed, scale, BLOCK: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Anything: its arguments matter."""
    at = tl.arange(0, BLOCK)
    value = (at + size + fixed) * scale
    if other_ptr is not None:
        value += tl.load(other_ptr + at)
    tl.store(x_ptr + at, value.to(x_ptr.dtype.element_ty))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    monkeypatch.setattr(triton_launch, "_compiled", {})
    store.device_caches.clear()
    triton.runtime.driver.set_active(made)
    yield made
    store.device_caches.clear()
    triton.runtime.driver._active = None


X, BYTES = torch.zeros(64), torch.zeros(64, dtype=torch.uint8)
CALL: dict[str, Any] = {"x": X, "other": X, "size": 3, "fixed": 5, "scale": 0.5, "BLOCK": 16, "WIDE": False}


def call(**changes: Any) -> None:
    x, other, size, fixed, scale, *_ = ({**CALL, **changes}).values()
    constants = {name: value for name, value in {**CALL, **changes}.items() if name not in [*CALL][:5]}
    launch(store, (2, 3), x, other, size, fixed, scale, **constants)


def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with each launch by Triton."""
    calls: list[Any] = []
    run = type(store).run
    monkeypatch.setattr(type(store), "run", lambda *args, **how: calls.append(args) or run(*args, **how))
    return calls


def test_an_equal_call_is_launched_directly(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    by_triton = looked_up(monkeypatch)
    call()
    driver.stream = 8
    call(x=torch.ones(64), size=7, fixed=6, scale=0.25)
    assert len(by_triton) == 1
    (source, *first), (same, *second) = driver.launches
    assert same is source
    assert first[:4] == [2, 3, 1, 7]
    assert second[:4] == [2, 3, 1, 8]
    assert second[4:6] == first[4:6]  # function and metadata
    assert second[6:9] == [None] * 3
    assert second[10:] == [X.data_ptr(), 7, 6, 0.25, None, None]
    assert len(first) == len(second)


CHANGES: dict[str, dict[str, Any]] = {
    "dtype": {"x": X.half()},
    "alignment": {"x": X[1:]},
    "alignment of the second": {"other": X[2:]},
    "none": {"other": None},
    "one": {"size": 1},
    "int64 without a specialisation": {"fixed": 2**40},
    "an integer": {"scale": 2},
    "a constant": {"BLOCK": 32},
    "another constant": {"WIDE": True},
    "an option": {"num_warps": 8},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_another_call_is_compiled(driver: Driver, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    call()
    by_triton = looked_up(monkeypatch)
    call(**change)
    assert len(by_triton) == 1
    call(**change)
    call()
    assert len(by_triton) == 1
    sources = [launched[0] for launched in driver.launches]
    assert sources[2] is sources[1] is not sources[0] is sources[3]


VALUES: list[Any] = [
    0, 1, 2, 15, 16, -1, -16, 2**31 - 1, 2**31, 2**32, -(2**31), -(2**31) - 1, -(2**40), 2**63 - 1, 2**63, 2**63 + 1,
    0.0, 1.0, True, False, None, X, X[1:], X[4:], X.half(), BYTES[1:], BYTES[16:], X.bfloat16(), torch.nn.Parameter(X),
    *(TensorDescriptor(X.to(dtype), [8, 8], [8, 1], [rows, 8]) for dtype in (torch.float32, torch.half) for rows in (4, 8)),
]  # fmt: skip


def test_keys_are_as_fine_as_specialisations(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any two values that a key does not tell apart are the same for Triton."""
    keys = []
    monkeypatch.setattr(triton_launch, "_compiled", type("Keys", (), {"get": lambda self, key: keys.append(key)})())
    monkeypatch.setattr(type(store), "run", lambda *args, **how: None)
    specialisations = []
    for value in VALUES:
        call(size=value)
        special = native_specialize_impl(BaseBackend, value, False, True, True)
        specialisations.append((keys[-1], tuple(map(str, special))))
    for (key, special), (other_key, other) in itertools.combinations(specialisations, 2):
        assert key != other_key or special == other, (special, other)
    assert len(set(keys)) < len(VALUES)


def test_triton_launches(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another device, with hooks, in debug mode, instrumented, for a subclass of tensors, and what is not a plain kernel."""
    call()
    by_triton = looked_up(monkeypatch)
    driver.device = 0
    for _ in range(2):
        call()
    driver.device = -1
    assert len(by_triton) == 2
    hooks: list[Any] = []
    triton.knobs.runtime.launch_enter_hook.add(hooks.append)
    call()
    triton.knobs.runtime.launch_enter_hook.remove(hooks.append)
    assert len(by_triton) == 3
    for knobs, name, value in (
        (triton.knobs.runtime, "debug", True),
        (triton.knobs.compilation, "instrumentation_mode", "any"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(knobs, name, value)
            call()
    assert len(by_triton) == 5
    for _ in range(2):
        call(x=X.as_subclass(type("Subclass", (torch.Tensor,), {})))
    assert len(by_triton) == 7
    call()
    assert len(by_triton) == 7
    tuned = triton.heuristics({"WIDE": lambda args: args["size"] > 4})(store)
    for size in (3, 5):
        launch(tuned, (1,), X, X, size, 5, 0.5, BLOCK=16)
    assert len(by_triton) == 9
    assert driver.launches[-1][0] is not driver.launches[-2][0]


def test_a_compiled_function_has_the_kernel_in_its_graph(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("has_triton", "has_triton_package"):
        monkeypatch.setattr(f"torch.utils._triton.{name}", lambda: True)
    traced: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        traced.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return lambda *args: ()

    def run(x: torch.Tensor) -> None:
        launch(store, (1,), x, x, 3, 5, 0.5, BLOCK=16, WIDE=False)

    torch.compile(run, backend=backend, fullgraph=True)(X)
    assert traced == ["triton_kernel_wrapper_mutation"]


def test_arguments_in_the_wrong_place_are_refused(driver: Driver) -> None:
    for positional, named in (((X, X, 3, 5), {"scale": 0.5, "BLOCK": 16}), ((X, X, 3, 5, 0.5, 16), {})):
        with pytest.raises(TypeError, match=f"^store .* {len(positional)} "):
            launch(store, (1,), *positional, **named, WIDE=False)
