"""The file named by MEGACPP_CONFIG: every key is checked, every error names the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacpp_mcore import settings as plugin_config
from megacpp_mcore.errors import ConfigFileError
from megacpp_mcore.model import preset
from tests.errors import raises


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


def test_a_whole_file(file: Path) -> None:
    file.write_text(
        "model: nam56r_tiny  # a comment\n"
        'overrides:\n  dsa: {schedule: "-FF", topk: 8}\n  rope_theta: 10000\n'
        "backends: {mamba3: reference, m2rnn: auto}\n"
    )
    loaded = plugin_config.load(file)
    assert loaded.path == file
    assert (loaded.model.dsa.schedule, loaded.model.dsa.topk, loaded.model.rope_theta) == ("-FF", 8, 10_000.0)
    assert loaded.model.name == "nam56r_tiny"
    assert loaded.backends == {"mamba3": "reference", "m2rnn": "auto"}
    with pytest.raises(TypeError):
        loaded.backends["mamba3"] = "auto"  # type: ignore[index]


@pytest.mark.parametrize("rest", ["", "overrides:\nbackends:\n", "overrides: {}\n"])
def test_parts_may_be_left_out(file: Path, rest: str) -> None:
    file.write_text("model: nam56r\n" + rest)
    loaded = plugin_config.load(str(file))
    assert loaded.model == preset("nam56r")
    assert loaded.backends == {}


def test_the_environment_names_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin_config.VARIABLE, raising=False)
    assert plugin_config.from_environment() is None
    monkeypatch.setenv(plugin_config.VARIABLE, "")
    assert plugin_config.from_environment() is None
    file.write_text("model: nam52\n")
    monkeypatch.setenv(plugin_config.VARIABLE, str(file))
    loaded = plugin_config.from_environment()
    assert loaded is not None
    assert loaded.model == preset("nam52")
    monkeypatch.setenv(plugin_config.VARIABLE, str(file) + ".not")
    with pytest.raises(ConfigFileError, match="MEGACPP_CONFIG"):
        plugin_config.from_environment()


WRONG: list[tuple[str, list[str]]] = [
    ("modle: nam56r\n", ["unknown key 'modle'", "did you mean 'model'"]),
    ("model: nam56r\nfoo: 1\n", ["unknown key 'foo'", "known: model, overrides, backends, dsa_index_cache"]),
    ("model: nam56r\n1: 2\n", ["key 1 is not a name", "line 2"]),
    ("model: nam56r\nmodel: nam52\n", ["key 'model' is given twice", "line 2"]),
    ("model: nam56r\noverrides: {dsa: {topk: 8, topk: 9}}\n", ["key 'topk' is given twice"]),
    ("model: nam56r\n? [a]\n: 1\n", ["is not a name"]),
    ("model: 7\n", ["'model' is 7", "name of a preset"]),
    ("overrides: {depth: 4}\n", ["'model' is None"]),
    ("model: nam57\n", ["there is no model 'nam57'", "did you mean"]),
    ('model: nam56r\noverrides: ""\n', ["'overrides' is ''", "expected a mapping"]),
    *((f"model: nam56r\n{key}: 0\n", [f"'{key}' is 0", "expected a mapping"]) for key in ("backends", *plugin_config._GROUPS)),
    ("model: nam56r\nbackends: {mamba3: 1}\n", ["backends.mamba3 is 1"]),
    ("model: nam56r\nbackends: {mamba4: auto}\n", ["no op called 'mamba4'", "did you mean 'mamba3'"]),
    ("model: nam56r\nbackends: {mamba3: refrence}\n", ["no backend for op mamba3 called 'refrence'"]),
    ("model: nam56r\noverrides: {deph: 4}\n", ["overrides: unknown key 'deph'", "did you mean 'depth'"]),
    ("model: nam56r\noverrides: {dsa: {topk: true}}\n", ["overrides.dsa.topk is True (bool)", "a whole number"]),
    ("model: nam56r\noverrides: {pattern: AEX}\n", ["character 'X' at position 3"]),
    ("model: nam56r\nobservability: {interval: 0}\n", ["observability.interval is 0", "above 0"]),
    ("model: nam56r\nobservability: {interval: 2.5}\n", ["observability.interval is 2.5", "a whole number"]),
    ("model: nam56r\nobservability: {heartbeat_s: true}\n", ["heartbeat_s is True", "a number"]),
    ("model: nam56r\nobservability: {heartbeat_s: .inf}\n", ["heartbeat_s is inf"]),
    ("model: nam56r\nobservability: {enabled: 1}\n", ["observability.enabled is 1", "true or false"]),
    ("model: nam56r\nobservability: {console: loud}\n", ["observability.console is 'loud'", "progress or stock"]),
    ("model: nam56r\nobservability: {policy: xml}\n", ["policy is 'xml'", "text or json"]),
    ("model: nam56r\ntransformer_engine: {atention: true}\n", ["transformer_engine", "'atention'", "'attention'"]),
    ("model: nam56r\nfp8: {recipe: blockwise}\n", ["fp8.recipe is 'blockwise'", "current, block, mxfp8 or null"]),
    ("model: nam56r\nfp8: {recipe: block, first: 0}\n", ["fp8.first is 0", "above 0"]),
    ("model: nam56r\nvendors: {flash5: false}\n", ["vendors: unknown key 'flash5'", "known: flash4, quack, liger"]),
    ("model: nam56r\nvendors: {quack: 0}\n", ["vendors.quack is 0", "true or false"]),
    ("model: nam56r\nvendors: [flash4]\n", ["'vendors' is ['flash4']", "expected a mapping"]),
    ("model: nam56r\ncompile: full\n", ["'compile' is 'full'", "off"]),
    ("model: nam56r\ncompile: regional\n", ["'compile' is 'regional', and there is nothing", "write off"]),
    ("model: nam56r\nrecompute: experts\n", ["'recompute' is 'experts'"]),
    ("model: nam56r\nrecompute: [m, m]\n", ["'recompute' is ['m', 'm']"]),
    ("model: nam56r\nrecompute: [expert]\n", ["recompute names 'expert'", "did you mean 'experts'"]),
    ("model: nam56r\nspeed_defaults: {cache_root: here}\n", ["cache_root is 'here'"]),
    ("model: nam56r\nexperimental_taxes: {anomaly_detektion: true}\n", ["did you mean 'anomaly_detection'"]),
    ("- nam56r\n", ["found list", "expected a mapping"]),
    ("", ["found NoneType", "expected a mapping"]),
    ("model: [\n", ["not valid YAML"]),
    ("model: nam56r\n---\nmodel: nam52\n", ["not valid YAML"]),
    ("model: !!python/object/apply:os.getcwd []\n", ["not valid YAML"]),
    ("model: a\x07b\n", ["not valid YAML"]),
    ("model: 2001-99-99\n", ["not valid YAML", "month"]),
    ("model: !!int x\n", ["not valid YAML"]),
    ("model: " + 600 * "[", ["not valid YAML"]),
]


@pytest.mark.parametrize(
    ("value", "layers", "roles"),
    [("{schedule: FSSFSS}", 6, "FSSFSS"), ("{schedule: FSS}", 7, "FSSFSSF"), ("{schedule: F}", 3, "FFF")],
)
def test_a_schedule_of_the_index_cache(
    file: Path, monkeypatch: pytest.MonkeyPatch, value: str, layers: int, roles: str
) -> None:
    file.write_text(f"dsa_index_cache: {value}\n")
    schedule = plugin_config.load_index_schedule(file)
    assert schedule is not None
    assert schedule.roles(layers) == roles
    monkeypatch.setenv(plugin_config.VARIABLE, str(file))
    assert plugin_config.index_schedule_from_environment() == schedule
    monkeypatch.setenv(plugin_config.VARIABLE, "")
    assert plugin_config.index_schedule_from_environment() is None


WRONG_SCHEDULES: list[tuple[str, list[str]]] = [
    ("dsa_index_cache: {schedule: FXS}\n", ["{'schedule': 'FXS'}", "with 'F' (Full: runs the indexer) or 'S'"]),
    ("dsa_index_cache: {schedule: '-FS'}\n", ["{'schedule': '-FS'}"]),
    ("dsa_index_cache: {schedule: SF}\n", ["{'schedule': 'SF'}", "the first one Full"]),
    ("dsa_index_cache: {schedule: ''}\n", ["{'schedule': ''}", "{schedule: FSSFSS}"]),
    ("dsa_index_cache: {schedule: }\n", ["{'schedule': None}"]),
    ("dsa_index_cache: {full: [0, 3]}\n", ["{'full': [0, 3]}", "{schedule: FSSFSS}"]),
    ("dsa_index_cache: FSS\n", ["'dsa_index_cache' is 'FSS'", "expected {schedule: FSSFSS}"]),
    ("model: nam56r\ndsa_index_cache: {schedule: FS}\n", ["the only key", "overrides: {dsa: {schedule: ...}}"]),
    ("dsa_index_cache: {schedule: FS}\nbackends: {mamba3: auto}\n", ["the only key"]),
    ("dsa_index_cash: {schedule: FS}\n", ["unknown key 'dsa_index_cash'", "did you mean 'dsa_index_cache'"]),
    ("{}\n", ["'model' is None"]),
    ("", ["found NoneType", "expected a mapping"]),
]


@pytest.mark.parametrize(
    ("load", "text", "names"),
    [(plugin_config.load, *case) for case in WRONG] + [(plugin_config.load_index_schedule, *case) for case in WRONG_SCHEDULES],
)
def test_what_is_wrong_is_named_with_the_file(load: Any, file: Path, text: str, names: list[str]) -> None:
    file.write_text(text)
    with pytest.raises(ConfigFileError) as raised:
        load(file)
    assert all(part in str(raised.value) for part in [str(file), *names]), str(raised.value)


def test_a_file_is_about_one_kind_of_model(file: Path) -> None:
    file.write_text("model: nam56r\n")
    assert plugin_config.load_index_schedule(file) is None
    file.write_text("dsa_index_cache: {schedule: FS}\n")
    with pytest.raises(ConfigFileError, match="the only key"):
        plugin_config.load(file)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.yaml", tmp_path):
        with raises(ConfigFileError, path, plugin_config.VARIABLE):
            plugin_config.load(path)
    (tmp_path / "latin.yaml").write_bytes(b"model: \xff\n")
    with raises(ConfigFileError, tmp_path / "latin.yaml"):
        plugin_config.load(tmp_path / "latin.yaml")


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "any.yaml"
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        with pytest.raises(ConfigFileError, match=r"any\.yaml"):
            plugin_config.load(path)
