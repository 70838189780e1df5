"""A new family is one file with its record, its op and its spec: parsed, counted, checked, and trained."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from megacpp_mcore.data.corpus import find_stdlib_sources
from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.errors import ModelError, PatternError
from megacpp_mcore.model import Layout, preset, with_overrides
from megacpp_mcore.model.families import FAMILIES
from megacpp_mcore.model.run import Run
from megacpp_mcore.policy import resolve
from tests import forks
from tests.errors import raises
from tests.layer_specs.toy_family import TOY, integrate

OVERRIDES = {"pattern": "TA", "depth": 4, "dsa": {"schedule": "-"}, "mtp": {"depth": 0}, "seq_length": 32}


def test_an_integrator_is_causal_and_forgets() -> None:
    x_SBD = torch.zeros(4, 1, 2)
    x_SBD[1] = 1.0
    y_SBD = integrate(x_SBD, torch.zeros(2))
    assert y_SBD[:, 0, 0].tolist() == [0.0, 0.5, 0.25, 0.125]


def test_a_family_is_known_where_its_record_is(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = preset("nam56r_tiny")
    with raises(PatternError, "'T'", "A, E, M, R"):
        with_overrides(tiny, OVERRIDES)
    monkeypatch.setitem(FAMILIES, "T", TOY)
    model = with_overrides(tiny, OVERRIDES)
    width = model.hidden_size
    assert (model.layers, [family.letter for family in model.families]) == ("TATA", ["A", "T"])
    assert model.parameters()["T"] == 2 * (width**2 + 2 * width)
    with raises(ModelError, "toys", "2"):
        model.check_layout(Layout(tensor=2, sequence_parallel=True))
    with raises(ModelError, "context parallelism is 2", "every layer is 1"):
        model.check_layout(Layout(context=2))
    assert resolve(Run(model), environment={}).value("precision").note == "selection of keys and the integrator in fp32"


def test_it_trains_on_the_cpu_lane(tmp_path: Path) -> None:
    prepare([str(find_stdlib_sources()[0].path)], str(tmp_path / "text"))
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump({"model": "nam56r_tiny", "overrides": OVERRIDES, "recompute": ["t"]}))
    words = [str(tmp_path / "text"), str(tmp_path / "observed")]
    done = forks.run(["-m", "tests.layer_specs.toy_family", *words], MEGACPP_CONFIG=str(file))
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    forward = 2 * 2 * preset("nam56r_tiny").hidden_size ** 2  # MFLOP a token, of two layers
    assert re.search(rf"^integrator +{forward / 1e6:.2f} +{forward / 5e5:.2f} +{forward / 1e6:.2f} ", done.stdout, re.MULTILINE)
    assert "| toy channels | none |" in done.stdout
    assert "| T | an integrator that forgets | Lapicque, arXiv 1907.00000 |" in done.stdout
    receipt = json.loads((tmp_path / "observed" / "receipt.json").read_text())
    assert receipt["flops"]["families"]["integrator"]["recomputed"] > 0
    assert receipt["shares"]["groups"]["toy"] > 0
