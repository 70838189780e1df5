"""pytest plugin of one arm: applies its patches before any test is collected, and writes every outcome down at once.

Started by :mod:`tests.upstream.run` with a Megatron-LM checkout first on the path, whose package ``tests`` hides this one.
"""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

DOWNLOAD = "tests.test_utils.python_scripts.download_unit_tests_dataset"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--apply-patches", default="", help="names, comma-separated")
    parser.addoption("--outcomes", type=Path, required=True, help="folder for one file per rank")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before Megatron's conftest is imported, which would fetch data sets that none of these tests reads."""
    sys.modules[DOWNLOAD] = types.ModuleType(DOWNLOAD)
    vars(sys.modules[DOWNLOAD])["download_and_extract_asset"] = lambda assets_dir: None
    if names := early_config.known_args_namespace.apply_patches:
        from megacpp_mcore import patches

        patches.apply(names.split(","))
        patches.verify()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(config.getoption("--outcomes")))


class Recorder:
    """Appends one JSON line per event to ``rank-N.jsonl``: a process that hangs or is killed leaves what it had done."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"rank-{os.environ.get('RANK', '0')}.jsonl").open("a", buffering=1, encoding="utf-8")

    def _write(self, **event: Any) -> None:
        self._file.write(json.dumps(event) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(uncollected=report.nodeid, reason=_reason(report.longrepr))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._outcome, self._reason, self._seconds = "passed", "", 0.0
        self._write(test=item.nodeid, outcome="unfinished")
        done = yield
        seconds = round(self._seconds, 2)
        self._write(test=item.nodeid, outcome=self._outcome, seconds=seconds, reason=self._reason)
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        if report.failed or (report.skipped and self._outcome == "passed"):
            self._outcome, self._reason = report.outcome, _reason(report.longrepr)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # With a status of one rank torchrun would end the others; what failed is in the file.
        session.exitstatus = 0
        registry = sys.modules.get("megacpp_mcore.patches.machinery.registry")
        rows = registry.default().status() if registry else []
        self._write(finished=[row["name"] for row in rows if row["state"] == "applied"])


def _reason(found: Any) -> str:
    if isinstance(found, tuple):  # of a skip: file, line, reason
        return str(found[2])
    crash = getattr(found, "reprcrash", None)
    lines = str(crash.message).strip().splitlines()[:1] if crash else str(found).strip().splitlines()[-1:]
    return lines[0][:300] if lines else ""
