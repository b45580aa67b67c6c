"""`milad cache` and `milad bench` as a shell uses them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def milad(library: Path, home: Path, *arguments: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MILA", "XDG"))}
    env.update(PYTHONPATH=str(ROOT), MILAD_LIBRARY=str(library), HOME=str(home))
    return subprocess.run([sys.executable, "-m", "milad", *arguments], env=env, stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=120)


def test_cache_lists_and_prunes_what_a_daemon_wrote(library, tiny, tmp_path):
    from e2e.conftest import Daemon
    folder = tmp_path / "kv"
    daemon = Daemon(tmp_path / "daemon", tiny(vocab_only=False), library, args=("--kv-cache-dir", str(folder), "--family", "plain"))
    status, _ = daemon.json("POST", "/v1/completions", {"prompt": "abcdefgh" * 40, "max_tokens": 2})
    assert status == 200 and daemon.stop() == 0
    listed = milad(library, tmp_path, "cache", "--kv-cache-dir", str(folder), "--json")
    rows = json.loads(listed.stdout)["models"]
    assert len(rows) == 1 and rows[0]["n_bytes"] > 0 and rows[0]["n_files"] > 0
    shown = milad(library, tmp_path, "cache", "--kv-cache-dir", str(folder))
    assert rows[0]["name"] in shown.stdout and str(folder) in shown.stderr
    pruned = milad(library, tmp_path, "cache", "prune", "0", "--kv-cache-dir", str(folder))
    assert pruned.returncode == 0 and not pruned.stdout
    assert json.loads(milad(library, tmp_path, "cache", "--kv-cache-dir", str(folder), "--json").stdout)["models"] == []


def test_prune_touches_nothing_of_others(library, tmp_path):
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "letter.txt").write_text("dear")
    assert milad(library, tmp_path, "cache", "prune", "0", "--kv-cache-dir", str(tmp_path / "kv")).returncode == 0
    assert (tmp_path / "kv" / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize("arguments", [("cache", "prune", "lots"), ("cache", "list", "3G"), ("bench", "--model", "/nowhere.gguf")])
def test_what_is_wrong_is_one_line(library, tmp_path, arguments):
    run = milad(library, tmp_path, *arguments)
    assert run.returncode in (1, 2) and not run.stdout and len(run.stderr.strip().splitlines()) == 1, run


def test_bench_measures_a_model(library, tiny, tmp_path):
    run = milad(library, tmp_path, "bench", "--model", str(tiny()), "--threads", "1", "--json")
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert [r["what"] for r in result["rows"]][:2] == ["prompt of 512", "answer"]
    assert all(r["tokens_per_s"] > 0 for r in result["rows"]) and result["threads"] == 1 and not run.stderr
    assert "of the limit" in milad(library, tmp_path, "bench", "--model", str(tiny()), "--threads", "1").stdout
