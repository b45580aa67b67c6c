"""The benchmark itself: its arithmetic, its table and plot, one real timed run of the core."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchlib import build, main, report

ROOT = Path(__file__).resolve().parent.parent


def test_shares_are_bytes_and_operations_over_the_limit():
    mine = {"rate": 100.0, "weight_bytes": 90, "kv_bytes": 10, "layer_params": 50}
    assert main.decode_share(mine, 20_000.0) == pytest.approx(0.5)
    assert main.prefill_share(mine, 20_000.0) == pytest.approx(0.5)


def test_rows_become_lines_and_bars():
    row = {"group": "g", "name": "x & y", "threads": 2, "unit": "tokens/s", "milad": 250.0, "peer": 100.0, "ratio": 2.5, "share": 0.5,
           "limit": "bandwidth"}
    assert "2.50" in report.line(row) and "50% read" in report.line(row)
    assert "x &amp; y" in report.svg([row]) and report.line({**row, "peer": None, "ratio": None, "share": None}).count("-") >= 3


def test_medians_are_of_ratios_within_a_round(monkeypatch, library):
    rates, others = iter([10.0, 100.0, 40.0]), iter([5.0, 100.0, 10.0])
    run = main.Run(3, True, (1,))
    run.cell("g", "n", 1, lambda: {"rate": next(rates)}, lambda: next(others))
    assert run.rows[0]["ratio"] == 2.0 and run.rows[0]["milad"] == 40.0


def test_a_timed_run_of_the_core(library, tiny, monkeypatch):
    monkeypatch.setenv("MILAD_LIBRARY", str(library))
    from benchlib import core
    for kind in ("decode", "prefill"):
        result = core.measure(tiny(), 1, kind, 8, 40, 2 if kind == "decode" else 1)
        assert result["rate"] > 0 and result["weight_bytes"] > 0 and result["threads"] == 1


def test_the_core_is_built_when_nothing_names_one(library, monkeypatch):
    if library.parent != ROOT / "build" / "test":
        pytest.skip("another library is tested: building here would take a minute")
    monkeypatch.delenv("MILAD_LIBRARY")
    assert build.library() == library and build.os.environ["MILAD_LIBRARY"] == str(library)


def test_a_failed_build_shows_the_compilers_words(tmp_path, monkeypatch):
    if not build.tool("cmake"):
        pytest.skip("no cmake")
    monkeypatch.delenv("MILAD_LIBRARY", raising=False)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    with pytest.raises(build.BuildError, match="native"):
        build.library()


def test_bad_groups_are_named():
    run = subprocess.run([sys.executable, str(ROOT / "scripts" / "bench"), "--only", "speed"], capture_output=True, text=True)
    assert run.returncode == 2 and "smollm2" in run.stderr
