"""Fetching models: what a bad server does ends in the whole file or in one line, and never in a wrong file under its name."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from conftest import ROOT
from hub_server import Hub, serving
from milad import catalogue, download, hub as hubs
from milad.cli import main as cli
from milad.errors import UsageError

DATA = b"GGUF" + random.Random(3).randbytes(1_000_000)
SHA256 = hashlib.sha256(DATA).hexdigest()
PATH = "/org/repo/resolve/main/m.gguf"


@pytest.fixture
def hub():
    with serving() as hub:
        hub.files[PATH] = DATA
        yield hub


def fetch(hub: Hub, folder: Path, **options) -> bytes:
    target = folder / "m.gguf"
    options.setdefault("sleep", lambda s: None)
    download.fetch(hub.url + PATH, target, **options)
    assert not [p for p in os.listdir(folder) if p != "m.gguf"]
    return target.read_bytes()


def left(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("moves", [
    [], [("cut", 0)], [("cut", 1)], [("cut", 500_000)], [("cut", 300_000)] * 3, [("cut", len(DATA) - 1)], [("chunked",)], [("chunked", "cut"), ("serve",)],
    [("cut", 400_000), ("no_range",)], [("cut", 400_000), ("wrong_range", 5)], [("cut", 400_000), ("wrong_range", -5)], [("status", 503)] * 3,
    [("status", 429), ("cut", 10)], [("cut", 400_000), ("length", 7)], [("stall", 1000, 1.0)], [("redirect", PATH)] * 3],
    ids=lambda m: "-".join(str(x) for move in m for x in move) or "plain")
@pytest.mark.parametrize("known", [True, False])
def test_it_ends_with_the_right_file(hub: Hub, tmp_path: Path, moves, known) -> None:
    hub.moves += moves
    size = {"size": len(DATA), "sha256": SHA256} if known else {}
    assert fetch(hub, tmp_path, stall_s=0.3, **size) == DATA


@pytest.mark.parametrize("known", [True, False])
def test_a_wrong_length_is_never_whole(hub: Hub, tmp_path: Path, known) -> None:
    hub.moves += [("length", 1000)] * 50
    with pytest.raises(UsageError, match="expected" if known else "kept"):
        fetch(hub, tmp_path, stall_s=0.3, size=len(DATA) if known else 0)
    assert "m.gguf" not in left(tmp_path)
    hub.moves.clear()
    assert fetch(hub, tmp_path, size=len(DATA)) == DATA


def test_a_resume_asks_for_the_rest_only(hub: Hub, tmp_path: Path) -> None:
    hub.moves += [("cut", 600_000)]
    assert fetch(hub, tmp_path) == DATA
    assert [h.get("range") for _, h in hub.seen] == [None, "bytes=600000-"] and hub.seen[1][1]["if-range"] == '"v1"'


def test_another_version_meanwhile_starts_anew(hub: Hub, tmp_path: Path) -> None:
    hub.moves += [("cut", 600_000)] + [("status", 503)] * 20
    with pytest.raises(UsageError, match="goes on from there"):
        fetch(hub, tmp_path)
    assert left(tmp_path) == [".m.gguf.part", ".m.gguf.part.json"]
    hub.moves.clear()
    hub.etag, hub.files[PATH] = '"v2"', b"GGUF" + bytes(700_000)
    assert fetch(hub, tmp_path) == hub.files[PATH]


@pytest.mark.parametrize("etag", [None, 'W/"weak"', f'"{SHA256}"'])
def test_etags_of_other_kinds(hub: Hub, tmp_path: Path, etag) -> None:
    hub.etag = etag
    hub.moves += [("cut", 600_000)]
    assert fetch(hub, tmp_path) == DATA
    assert "if-range" not in hub.seen[1][1] or etag == f'"{SHA256}"'


def test_a_wrong_hash_never_gets_the_name(hub: Hub, tmp_path: Path) -> None:
    for sha256, etag in (("0" * 64, '"v"'), ("", f'"{"0" * 64}"')):
        hub.etag = etag
        with pytest.raises(UsageError, match="SHA-256"):
            fetch(hub, tmp_path, sha256=sha256)
        assert left(tmp_path) == []


def test_a_linked_hash_is_checked(hub: Hub, tmp_path: Path) -> None:
    """Hugging Face: the hub's redirect names the file's SHA-256 and size, the store behind it does not."""
    hub.files["/blob"] = DATA
    for sha256, size, right in ((SHA256, len(DATA), True), ("0" * 64, len(DATA), False)):
        hub.moves = [("redirect", "/blob", {"X_Linked_ETag": f'"{sha256}"', "X_Linked_Size": size})]
        if right:
            assert fetch(hub, tmp_path) == DATA
            (tmp_path / "m.gguf").unlink()
        else:
            with pytest.raises(UsageError, match="SHA-256"):
                fetch(hub, tmp_path)


def test_a_damaged_part_is_fetched_anew(hub: Hub, tmp_path: Path) -> None:
    """As after a power cut: the right length, zeros for bytes."""
    hub.moves += [("cut", 600_000)] + [("status", 503)] * 20
    with pytest.raises(UsageError):
        fetch(hub, tmp_path, sha256=SHA256)
    hub.moves.clear()
    with open(tmp_path / ".m.gguf.part", "r+b") as f:
        f.seek(100_000)
        f.write(bytes(50_000))
    assert fetch(hub, tmp_path, sha256=SHA256) == DATA


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"url": 3}', b'{"url": "x", "size": -1, "etag": "", "sha256": ""}', b"\xff\x00"])
def test_a_damaged_note_beside_the_part(hub: Hub, tmp_path: Path, damage: bytes) -> None:
    (tmp_path / ".m.gguf.part").write_bytes(b"x" * 2_000_000)
    (tmp_path / ".m.gguf.part.json").write_bytes(damage)
    assert fetch(hub, tmp_path) == DATA


@pytest.mark.parametrize("url", ["http://user:secretword@127.0.0.1:1/m.gguf", "http://127.0.0.1:1/m.gguf?signature=secretword",
                                 "http://127.0.0.1:99999/m.gguf?secretword", "http://[::1/m.gguf?secretword", "http://127.0.0.1:x/m.gguf"])
def test_errors_hold_no_secrets_and_odd_addresses_are_one_line(tmp_path: Path, url, capsys, monkeypatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda s: None)
    assert cli.main(["pull", url, "--models-dir", str(tmp_path)]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith("milad: ") and not any("secretword" in line for line in err)


@pytest.mark.parametrize("code,word", [(401, "HF_TOKEN"), (403, "terms"), (404, "spelled")])
def test_refusals_are_not_tried_again(hub: Hub, tmp_path: Path, code, word) -> None:
    hub.moves += [("status", code)]
    with pytest.raises(UsageError, match=word):
        fetch(hub, tmp_path)
    assert len(hub.seen) == 1


def test_credentials_stay_with_their_origin(hub: Hub, tmp_path: Path) -> None:
    with serving() as other:
        other.files["/blob"] = DATA
        hub.moves += [("redirect", f"{other.url}/blob")]
        assert fetch(hub, tmp_path, headers={"Authorization": "Bearer hf_secret"}) == DATA
        assert "authorization" in hub.seen[0][1] and "authorization" not in other.seen[0][1]
    for target in ("file:///etc/passwd", "ftp://127.0.0.1/x"):
        hub.moves += [("redirect", target)]
        with pytest.raises(UsageError):
            fetch(hub, tmp_path)
    hub.moves += [("redirect", PATH)] * 50
    with pytest.raises(UsageError):
        fetch(hub, tmp_path)


def test_a_full_disk_is_told_beforehand(hub: Hub, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": download.SPARE + len(DATA) - 1})())
    with pytest.raises(UsageError, match="MiB are free"):
        fetch(hub, tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": download.SPARE + len(DATA)})())
    assert fetch(hub, tmp_path) == DATA


def test_a_disk_that_gets_full_on_the_way(hub: Hub, tmp_path: Path) -> None:
    """A file size limit stands for it: the write fails in its middle. What came stays, and goes on later."""
    command = [sys.executable, "-c", "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
               f"resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, resource.RLIM_INFINITY)); sys.path.insert(0, {str(ROOT)!r});"
               "from milad.cli.main import main; sys.exit(main(sys.argv[1:]))",
               "pull", f"{hub.url}{PATH}", "--models-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "too large" in done.stderr and done.stderr.count("\n") <= 2
    assert (tmp_path / ".m.gguf.part").stat().st_size == 500_000
    assert fetch(hub, tmp_path) == DATA and hub.seen[-1][1]["range"] == "bytes=500000-"


def test_two_at_once(hub: Hub, tmp_path: Path) -> None:
    hub.rate = 1_000_000
    thread = threading.Thread(target=fetch, args=(hub, tmp_path))
    thread.start()
    while not hub.seen:
        time.sleep(0.01)
    with pytest.raises(UsageError, match="another process"):
        download.fetch(hub.url + PATH, tmp_path / "m.gguf")
    thread.join()
    assert (tmp_path / "m.gguf").read_bytes() == DATA


def test_killed_at_ten_random_moments(hub: Hub, tmp_path: Path, default_model: Path) -> None:
    """The default model, `milad pull` killed with -9 again and again: in the end it is whole and nothing else lies there."""
    rng = random.Random(11)
    hub.files["/SmolLM2-135M-Instruct.Q4_1.gguf"] = default_model.read_bytes()
    hub.rate = 60e6
    command = [sys.executable, "-m", "milad", "pull", f"{hub.url}/SmolLM2-135M-Instruct.Q4_1.gguf", "--sha256", catalogue.DEFAULT.sha256,
               "--models-dir", str(tmp_path / "models")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    target = tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    n_killed = 0
    for _ in range(10):
        n_before = len(hub.seen)
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 20
        while len(hub.seen) == n_before and time.monotonic() < end and process.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        n_killed += process.wait() == -signal.SIGKILL
        if target.exists():             # whole or not there; a kill may come after the name and before the exit
            assert catalogue.sha256(target) == catalogue.DEFAULT.sha256
            target.unlink()
        else:
            assert process.returncode != 0
    assert n_killed >= 5
    hub.rate = 0
    assert subprocess.run(command, env=env, capture_output=True).returncode == 0
    assert left(tmp_path / "models") == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert catalogue.sha256(target) == catalogue.DEFAULT.sha256
    assert any(h.get("range", "bytes=0-") != "bytes=0-" for _, h in hub.seen)


# Names


LISTING = ["model-Q4_K_M.gguf", "model-Q8_0.gguf", "model-BF16-00001-of-00002.gguf", "model-BF16-00002-of-00002.gguf", "sub/model.IQ4_XS.gguf",
           "mmproj-model-f16.gguf"]


@pytest.mark.parametrize("which,wanted", [
    ("", ["model-Q4_K_M.gguf"]), ("q8_0", ["model-Q8_0.gguf"]), ("Q4_K_M", ["model-Q4_K_M.gguf"]), ("bf16", LISTING[2:4]),
    ("model-BF16-00002-of-00002.gguf", LISTING[2:4]), ("IQ4_XS", ["sub/model.IQ4_XS.gguf"]), ("sub/model.IQ4_XS.gguf", ["sub/model.IQ4_XS.gguf"]),
    ("model.IQ4_XS.gguf", ["sub/model.IQ4_XS.gguf"])])
def test_choosing(which, wanted):
    assert [e["path"] for e in hubs.choose({p: {"path": p} for p in LISTING}, which, "o/r")] == wanted


@pytest.mark.parametrize("listing,which,word", [
    (LISTING, "Q5_K", "no file fits"), (LISTING, "model", "files fit"), ([], "", "no GGUF"), (["README.gguf", "b.gguf"], "", "2 files"),
    (LISTING[2:3], "bf16", "lacks")])
def test_choosing_says_what_there_is(listing, which, word):
    with pytest.raises(UsageError, match=word):
        hubs.choose({p: {"path": p} for p in listing}, which, "o/r")


@pytest.mark.parametrize("name", ["hf:", "hf:org", "hf:org/", "hf:../x/y", "hf:a/..", "hf:a/b/c", "hf:a/b:c:d", "hf:a/b?x", "hf:/etc/passwd",
                                  "http://h/.gguf", "http://h/..", "http://h/a%2f..%2fb", "http://h/x.bin", "http://h/.x.gguf", "ftp://h/x.gguf",
                                  "http:///x.gguf", "http://h/x-00003-of-00002.gguf", "http://h/%00.gguf", "file:///x.gguf"])
def test_names_that_are_none(tmp_path, name, capsys):
    assert cli.main(["pull", name, "--models-dir", str(tmp_path / "m")]) == 1
    assert capsys.readouterr().err.count("\n") == 1 and not list(tmp_path.rglob("*.gguf"))


def test_a_repository(hub: Hub, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    part = b"GGUF" + bytes(1000)
    hub.add("org/repo", "m.gguf", DATA)
    for i in (1, 2, 3):
        hub.add("org/repo", f"big-Q8_0-0000{i}-of-00003.gguf", part + bytes([i]))
    folder = ["--models-dir", str(tmp_path)]
    assert cli.main(["pull", "hf:org/repo:Q8_0", *folder]) == 0
    assert left(tmp_path) == [f"big-Q8_0-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert capsys.readouterr().out.strip().endswith("00001-of-00003.gguf")
    assert all(h["authorization"] == "Bearer hf_token" for _, h in hub.seen)
    n = len(hub.seen)
    assert cli.main(["pull", "hf:org/repo:Q8_0", *folder]) == 0 and len(hub.seen) == n + 1      # the list only
    assert cli.main(["models", "--json", *folder]) == 0
    (listed,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert listed["name"] == "big-Q8_0" and listed["bytes"] == 3 * len(part) + 3
    (tmp_path / "m.gguf").write_bytes(b"GGUF of somebody else")
    assert cli.main(["pull", "hf:org/repo:m.gguf", *folder]) == 1 and "another file" in capsys.readouterr().err
    assert cli.main(["models", "rm", "m", *folder]) == 0 and cli.main(["models", "rm", "big-Q8_0", *folder]) == 0
    assert left(tmp_path) == []
    assert cli.main(["pull", "hf:org/none", *folder]) == 1 and "404" in capsys.readouterr().err
    hub.files["/page.gguf"] = b"<html>"
    assert cli.main(["pull", f"{hub.url}/page.gguf", *folder]) == 1 and "not a GGUF" in capsys.readouterr().err and left(tmp_path) == []


@pytest.mark.parametrize("answer", [{}, [3, None, {"path": 3}], [{"path": "m.gguf", "lfs": 7, "size": "x"}], [{"path": "../../m.gguf"}],
                                    [{"path": "m.gguf", "lfs": {"oid": "zz", "size": -5}}]])
def test_odd_listings(hub: Hub, tmp_path: Path, monkeypatch, answer, capsys) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    hub.listings["o/r"] = answer
    code = cli.main(["pull", "hf:o/r", "--models-dir", str(tmp_path / "models")])
    assert code == 1 and capsys.readouterr().err.strip() and "m.gguf" not in os.listdir(tmp_path)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", ".", "", "a/b", "m.gguf/../../x"])
def test_rm_takes_names_only(tmp_path: Path, name, capsys) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert cli.main(["models", "rm", name, "--models-dir", str(folder)]) in (1, 2)
    assert left(folder) == ["m.gguf"] and (tmp_path / "x.gguf").exists()


def test_show(default_model: Path, library, capsys) -> None:
    assert cli.main(["models", "show", str(default_model), "--ctx", "2048", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["architecture"] == "llama" and found["family"] == "chatml" and found["context"] == 8192
    assert found["kv_bytes"]["bytes"] == 30 * 3 * 64 * 2 * 2 * 2048
    assert cli.main(["models", "show", "nobodys"]) == 1
