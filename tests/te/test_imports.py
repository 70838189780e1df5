"""The import firewall: nothing of Transformer Engine is imported where it is off, and nothing raises where it is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megacpp_mcore.backends import Dispatcher, te_disabled
from megacpp_mcore.errors import BackendError
from megacpp_mcore.settings import load
from megacpp_mcore.util import te_imports
from megacpp_mcore.util.probe import ProbeResult
from tests import stock
from tests.errors import raises


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(te_imports.DISABLE_TE, raising=False)
    cached = te_imports._installed
    cached.cache_clear()
    yield
    te_imports.configure(None)
    cached.cache_clear()


# Everything of the package is imported, and a model is built as a TE machine would, with the importing modules noted.
_HOOK = """
import importlib, json, os, pkgutil, sys
os.environ["MEGACPP_DISABLE_TE"] = "1"
found = set()

class Hook:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transformer_engine":
            frame = sys._getframe(1)
            while frame.f_globals.get("__name__", "").startswith(("importlib", "_frozen")):
                frame = frame.f_back
            found.add(frame.f_globals["__name__"])
        return None

sys.meta_path.insert(0, Hook())
import megacpp_mcore
skipped = []
for module in pkgutil.walk_packages(megacpp_mcore.__path__, "megacpp_mcore."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        skipped.append(f"{module.name}: {error}")
from megacpp_mcore.backends import Dispatcher
from megacpp_mcore.backends.candidates import LAYER_PARTS, layer_parts_candidates
from megacpp_mcore.te import specs
from megacpp_mcore.util import te_imports
assert not te_imports.available().ok and not any(specs.specs().values()) and set(specs.specs()) == set(specs.CLASSES)
made = layer_parts_candidates(transformer_engine=lambda: "te", local=lambda: "local")
assert Dispatcher(candidates=made).request(LAYER_PARTS, "transformer_engine", device="cuda").fn() == "local"
Dispatcher().request("mla", device="cuda", dtype="bfloat16", qk_dim=64, v_dim=64)
print(json.dumps([sorted(found), skipped]))
"""


def test_with_the_variable_no_module_of_ours_imports_it() -> None:
    importers, skipped = stock.printed(_HOOK)
    assert [importer for importer in importers if importer.startswith("megacpp_mcore")] == []
    # What megatron.core imports by itself, whatever this package does; a longer list is worth a look.
    assert {importer.rpartition(".")[0].partition(".")[0] for importer in importers} <= {"megatron", "torch"}
    assert "megatron.core.utils" in importers or "megatron.core.extensions.transformer_engine" in importers
    # Nothing but modules of environments that are not this one's.
    assert all(any(name in module for name in ("bridge", "nemo", "transformers")) for module in skipped), skipped


def test_a_bare_package_is_as_good_as_none(tmp_path: Path) -> None:
    """``pip install transformer-engine`` without its PyTorch part: the package imports, and swallows what its part raises."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("try:\n    from . import pytorch\nexcept ImportError:\n    pass\n")
    code = (
        "import json\nfrom megacpp_mcore.te import specs\n"
        "from megacpp_mcore.util import te_imports\nfrom megacpp_mcore.errors import BackendError\n"
        "try:\n    te_imports.entry('Linear')\nexcept BackendError as error:\n    said = str(error)\n"
        "print(json.dumps([te_imports.available().ok, said, [one for one in specs.specs().values() if one]]))"
    )
    is_there, reason, classes = stock.printed(code, first=tmp_path)
    assert (is_there, classes) == (False, [])
    assert reason.startswith("Linear of Transformer Engine cannot be used: importing transformer_engine.pytorch failed")


def test_availability_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[str] = []
    monkeypatch.setattr(te_imports, "probe_import", lambda name: (probed.append(name), ProbeResult(True))[1])
    assert [te_imports.available().ok for _ in range(3)] == [True] * 3
    assert probed == ["transformer_engine.pytorch"]
    monkeypatch.setenv(te_imports.DISABLE_TE, "1")  # the switch is read each time
    assert te_imports.available() == ProbeResult(False, "MEGACPP_DISABLE_TE=1 disables Transformer Engine")
    monkeypatch.setenv(te_imports.DISABLE_TE, "yes")
    with raises(BackendError, "MEGACPP_DISABLE_TE is 'yes'", "expected 1"):
        te_imports.available()


def test_an_entry_point_that_this_version_lacks(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_imports, "ENTRIES", {"floor": "math", "gone": "math"})
    te_imports._entry.cache_clear()
    assert te_imports.entry("floor")(1.5) == 1
    with raises(BackendError, "math:gone"):
        te_imports.entry("gone")
    te_imports._entry.cache_clear()


def test_the_key_of_the_file_is_the_variable_for_one_run(installed: None, tmp_path: Path) -> None:
    file = tmp_path / "megacpp.yaml"
    file.write_text("model: nam56r_tiny\ntransformer_engine: {enabled: false}\n")
    te_imports.configure(load(file).transformer_engine, str(file))
    reason = f"transformer_engine: {{enabled: false}} in {file} disables Transformer Engine"
    assert (te_disabled(), te_imports.available().reason) == (reason, reason)


def test_a_feature_of_its_own(installed: None, configure: Callable[..., None]) -> None:
    off = {name for name in te_imports.FEATURES if not getattr(te_imports.Features(), name)}
    assert off == {"mtp", "linear"}  # which change a model
    for name in te_imports.FEATURES:
        configure(**{name: False})
        assert te_imports.feature(name) == ProbeResult(False, f"transformer_engine: {{{name}: false}} in a file")
        assert te_imports.available().ok
        assert all(te_imports.feature(other).ok for other in {*te_imports.FEATURES} - off - {name})
    with raises(BackendError, "'atention'", "'attention'"):
        te_imports.feature("atention")


def test_the_fused_norm_of_mtp_needs_the_engine(configure: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps the names of checkpoints: the norm's weight is found where it is, and saved as what it was."""
    with stock.cpu_lane():
        from megatron.core.transformer.identity_op import IdentityOp

        from megacpp_mcore.layer_specs import mtp, parts
        from megacpp_mcore.layer_specs.mtp import FUSED_NORM, mtp_block

        configure(mtp=True)
        with raises(BackendError, "TELayerNormColumnParallelLinear", "transformer_engine"):
            mtp_block(parts._local_parts(), Dispatcher(), None)
        monkeypatch.setattr(te_imports, "entry", lambda name: type(name, (), {}))
        monkeypatch.setattr(mtp, "feed_forward", lambda stock, *_: stock)
        (layer,) = mtp_block(parts._local_parts(), Dispatcher(), None).layer_specs
        inner = layer.submodules.mtp_model_layer.submodules
        assert inner.pre_mlp_layernorm is IdentityOp
        assert inner.sharded_state_dict_keys_map == FUSED_NORM
        assert inner.mlp.keywords["submodules"].linear_fc1.__name__ == "TELayerNormColumnParallelLinear"
