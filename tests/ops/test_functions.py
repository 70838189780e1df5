"""The ops by their names in megacpp_mcore.ops: without Megatron, next to packages of the same names, with labels to ignore."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp_mcore import ops
from megacpp_mcore.backends import Dispatcher
from megacpp_mcore.errors import BackendError, ModelError
from megacpp_mcore.ops import linear_cross_entropy, mamba3, rms_norm
from tests import forks
from tests.errors import raises
from tests.repository.test_docs import PAGES, blocks

ROOT = Path(__file__).parents[2]

ALONE = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("megatron", "transformer_engine", "psutil", "yaml", "packaging", "numpy"):
            raise ModuleNotFoundError(f"{name} was imported")

sys.meta_path.insert(0, Absent())
setup, *rest = json.load(sys.stdin)
given, found = {}, []
exec(setup, given)
import torch
torch.manual_seed(1)
made = []
def randn(*shape):
    made.append(torch.randn(shape, requires_grad=True))
    return made[-1]
for code in rest:
    given["randn"] = randn
    made.clear()
    exec(code, given)
    given["out"].sum().backward()
    found.append([list(given["out"].shape), [one.grad is not None and bool(one.grad.any()) for one in made]])
print(json.dumps(found))
"""


def test_the_lines_of_every_op_run_without_megatron() -> None:
    """Those of the page, forward and backward; every input gets a gradient but the indexer's three."""
    code = blocks(PAGES["ops.md"], "python")
    assert all(name in "".join(code) for name in ops.__all__)
    assert all(len(ast.parse(block).body) <= 4 for block in code[1:])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALONE], input=json.dumps(code), env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    printed = json.loads(done.stdout.splitlines()[-1])
    shapes = [[32, 2, 4, 16], [32, 2, 64], [32, 2, 4, 16], [32, 64], [], [32, 2, 64], []]
    assert [shape for shape, _ in printed] == shapes
    without = {2: [False] * 3}
    assert [has for _, has in printed] == [
        without.get(number, []) + [True] * (len(has) - len(without.get(number, []))) for number, (_, has) in enumerate(printed)
    ]


def test_functions_and_packages_of_one_name() -> None:
    import megacpp_mcore.ops.mamba3.reference as one
    from megacpp_mcore.ops.mamba3 import reference as two

    assert one is two is mamba3.reference is importlib.import_module("megacpp_mcore.ops.mamba3.reference")
    assert callable(importlib.import_module("megacpp_mcore.ops").m2rnn)
    code = "import megacpp_mcore.ops.m2rnn.reference as r; from megacpp_mcore.ops import m2rnn; "
    code += "print(r.__name__, m2rnn.reference is r)"
    done = forks.run(["-c", code])
    assert done.stdout.strip() == "megacpp_mcore.ops.m2rnn.reference True", done.stderr
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        mamba3.other  # noqa: B018
    for name in ops.__all__:
        function = getattr(ops, name)
        assert "Raises:" in function.__doc__
        assert {"backend", "reduction"} & set(inspect.signature(function).parameters)
    assert copy.deepcopy(mamba3) is copy.copy(mamba3) is mamba3
    assert b"mamba3" in pickle.dumps(mamba3)


def losses(**options: Any) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Ours and PyTorch's: the loss, and the gradients of hidden states, weight and bias."""
    generator = torch.Generator().manual_seed(2)
    leaves = [torch.randn(shape, generator=generator).double().requires_grad_() for shape in ((5, 3, 8), (11, 8), (11,))]
    label = torch.randint(11, (5, 3), generator=generator)
    label[1, :2] = options.get("ignore_index", -100)
    upstream = torch.randn(5, 3, generator=generator).double()
    for run in (True, False):
        hidden, weight, bias = leaves
        if run:
            loss = linear_cross_entropy(hidden, weight, label, bias_V=bias, **options)
        else:
            logits = torch.nn.functional.linear(hidden, weight, bias).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, label.flatten(), **options)
        loss = loss.view(label.shape) if loss.dim() else loss
        yield [loss, *torch.autograd.grad(loss, leaves, upstream if loss.dim() else None)]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [{}, {"ignore_index": -1}, {"ignore_index": 99}])
def test_the_loss_is_pytorchs(reduction: str, ignored: dict[str, int]) -> None:
    ours, pytorchs = losses(reduction=reduction, **ignored)
    for actual, expected in zip(ours, pytorchs, strict=True):
        torch.testing.assert_close(actual, expected)


def test_labels_that_are_none_are_refused() -> None:
    hidden, weight = torch.randn(4, 8), torch.randn(11, 8)
    for wrong in (11, -1):
        with raises(ModelError, f"label {wrong}", "0 to 10", -100):
            linear_cross_entropy(hidden, weight, torch.tensor([1, wrong, 3, 4]))
    with raises(ModelError, "ignore_index is 3"):
        linear_cross_entropy(hidden, weight, torch.tensor([1, 2, 3, 4]), ignore_index=3)
    with raises(ModelError, "reduction is 'average'"):
        linear_cross_entropy(hidden, weight, torch.tensor([1, 2, 3, 4]), reduction="average")
    nothing = torch.full((4,), -100)
    assert linear_cross_entropy(hidden, weight, nothing).isnan()
    assert linear_cross_entropy(hidden, weight, nothing, reduction="sum") == 0


def test_the_backend_is_chosen_by_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[dict[str, Any]] = []

    class Watched(Dispatcher):
        def request(self, op: str, name: str | None = None, **needs: Any) -> Any:
            requests.append({"op": op, "name": name, **needs})
            return super().request(op, name, **needs)

    monkeypatch.setattr(ops, "_dispatcher", Watched)
    ops._chosen.cache_clear()
    x = torch.randn(2, 8)
    try:
        rms_norm(x, torch.ones(8))
        rms_norm(x + 1, torch.ones(8))
        torch.use_deterministic_algorithms(True)
        rms_norm(x, torch.ones(8), backend="reference")
    finally:
        torch.use_deterministic_algorithms(False)
        ops._chosen.cache_clear()
    common = {"op": "rms_norm", "device": "cpu", "dtype": torch.float32, "packed": False, "hidden": 8}
    assert requests == [common | {"name": name, "deterministic": on} for name, on in (("auto", False), ("reference", True))]
    with pytest.raises(BackendError, match="triton"):
        rms_norm(x, torch.ones(8), backend="triton")


def test_the_loop_of_the_examples_learns() -> None:
    words = [str(ROOT / "examples" / "ops_loop.py"), "--steps", "11", "--device", "cpu"]
    done = forks.run(words)
    assert done.returncode == 0, done.stderr[-3000:]
    first, last = (float(line.split()[3]) for line in done.stdout.splitlines())
    assert last < first < 5.6
