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
           "limit": "bandwidth", "read_GBps": 36.2}
    assert "2.50" in report.line(row) and "50% of 36 GB/s" in report.line(row)
    assert "x &amp; y" in report.svg([row]) and report.line({**row, "peer": None, "ratio": None, "share": None}).count("-") >= 3


def test_medians_are_of_ratios_within_a_round(monkeypatch, library):
    rates, others = iter([10.0, 100.0, 40.0]), iter([5.0, 100.0, 10.0])
    run = main.Run(3, True, (1,))
    run.cell("g", "n", 1, lambda: {"rate": next(rates)}, lambda: next(others))
    assert run.rows[0]["ratio"] == 2.0 and run.rows[0]["milad"] == 40.0


def decoded(rate: float, read: float, last: float | None = None, steady: bool = True) -> dict:
    return {"rate": rate, "read": read, "last_read": last or read, "steady": steady, "weight_bytes": 1, "kv_bytes": 0}


def test_rounds_beside_which_memory_changed_are_measured_again(monkeypatch):
    from milad import capi
    after = iter([50.0, 99.0, 50.0, 50.0, 50.0])                 # what memory gives when the peer has run
    monkeypatch.setattr(capi, "probe", lambda kind, threads: next(after))
    ours = iter([decoded(9, 50), decoded(90, 50), decoded(80, 50, steady=False), decoded(70, 99, last=50), decoded(11, 52)])
    run = main.Run(2, True, (2,))
    run.cell("g", "n", 2, lambda: next(ours), lambda: 5.0, "bandwidth", main.decode_share)
    row = run.rows[0]
    assert (row["milad"], row["ratio"], row["unsteady_rounds"], row["read_GBps"]) == (10.0, 2.0, 3, 0.0)
    assert row["share"] == pytest.approx((9 / 50 + 11 / 52) / 2)


def test_memory_that_never_rests_ends_all_the_same(monkeypatch):
    from milad import capi
    monkeypatch.setattr(capi, "probe", lambda kind, threads: 1e9)
    run = main.Run(1, True, (2,))
    run.cell("g", "n", 2, lambda: decoded(4, 2e9, steady=False), lambda: 2.0, "bandwidth", main.decode_share)
    assert run.rows[0]["unsteady_rounds"] == main.UNSTEADY and run.rows[0]["ratio"] == 2.0 and "of 2 GB/s" in report.line(run.rows[0])
    assert "kept changing" in report.line(run.rows[0])


def test_a_timed_run_of_the_core(library, tiny, monkeypatch):
    monkeypatch.setenv("MILAD_LIBRARY", str(library))
    from benchlib import core
    for kind in ("decode", "prefill"):
        result = core.measure(tiny(), 1, kind, 8, 40, 2 if kind == "decode" else 1)
        assert result["rate"] > 0 and result["weight_bytes"] > 0 and result["threads"] == 1 and "read" not in result
    result = core.measure(tiny(), 1, "decode", 8, reads=True)
    assert result["read"] > 0 and result["last_read"] > 0 and result["steady"] in (True, False)


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
