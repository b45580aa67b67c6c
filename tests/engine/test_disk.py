"""The disk tier: what comes back is what was written, or nothing; under damage, full disks, kill -9, and several daemons."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from fake import FakeContext, FakeModel
from milad.engine import disk as disk_module
from milad.engine.base import BLOCK, Done
from milad.engine.blocks import ROOT, Blocks, chain
from milad.engine.disk import HEADER_BYTES, Disk, prune, survey
from milad.engine.loop import Engine
from test_loop import Reader, until
from test_scheduler import prompt

BLOCK_BYTES = 8 * BLOCK


class Arena:
    """Blocks and a context filled by hand, with a Disk beside them."""

    def __init__(self, root: Path, max_bytes: int = 1 << 30, **options: Any) -> None:
        self.context = FakeContext(16)
        self.blocks = Blocks(16)
        self.n_wakes = 0
        self.disk = Disk(str(root), max_bytes, **{"fingerprint": 7, "kv_type": "f16", "layout": "avx2-0.1",
                                                  "block_bytes": BLOCK_BYTES, "wake": self.wake, **options})
        self.disk.attach(self.blocks, self.context)

    def wake(self) -> None:
        self.n_wakes += 1

    def fill(self, tokens: list[int], parent: bytes = ROOT) -> bytes:
        block = self.blocks.allocate()
        assert block is not None
        self.context.kv[block][:] = [(t, i) for i, t in enumerate(tokens)]
        data = array("i", tokens).tobytes()
        key = chain(parent, data)
        self.blocks.register(block, parent, data, key)
        self.blocks.release(block)
        return key

    def write(self) -> None:
        until(lambda: not self.disk.idle() and not self.disk._pending and not self.disk._n_queued)

    def read(self, keys: list[bytes], parents: list[bytes], tokens: list[list[int]]) -> list[bytes]:
        ticket = self.disk.fetch(keys, parents, [array("i", t).tobytes() for t in tokens])
        found: list[bytes] = []
        until(lambda: found.extend(bytes(self.disk.take(ticket)) for _ in range(len(ticket.loaded))) or ticket.done)
        return found + [bytes(self.disk.take(ticket)) for _ in range(len(ticket.loaded))]


def payload(tokens: list[int]) -> bytes:
    return array("i", [x for i, t in enumerate(tokens) for x in (t, i)]).tobytes()


def files(root: Path) -> list[Path]:
    return sorted(root.glob("*/*.kv"))


def test_a_block_comes_back(tmp_path: Path) -> None:
    a = Arena(tmp_path / "kv")
    one, two = prompt(1, 32), prompt(2, 32)
    k1 = a.fill(one)
    k2 = a.fill(two, k1)
    a.write()
    assert len(files(tmp_path / "kv")) == 2 and a.disk.stats()["n_written"] == 2
    mode = lambda p: os.stat(p).st_mode & 0o777                                     # noqa: E731
    assert {mode(f) for f in files(tmp_path / "kv")} == {0o600} and mode(files(tmp_path / "kv")[0].parent) == 0o700
    a.disk.close()
    b = Arena(tmp_path / "kv")
    assert b.disk.probe([k1, k2], 0) == 2 and b.disk.probe([k2], 0) == 1 and b.disk.probe([ROOT, k1], 0) == 0
    assert b.read([k1, k2], [ROOT, k1], [one, two]) == [payload(one), payload(two)]
    assert b.n_wakes >= 2
    b.disk.close()
    for other in ({"fingerprint": 8}, {"kv_type": "q8_0"}, {"layout": "avx512-0.1"}):
        c = Arena(tmp_path / "kv", **other)
        assert c.disk.probe([k1], 0) == 0
        c.disk.close()


def test_evicted_before_it_was_idle(tmp_path: Path) -> None:
    a = Arena(tmp_path)
    keys = [a.fill(prompt(i, 32)) for i in range(20)]                               # of 16 blocks
    assert a.blocks.n_evicted == 4
    a.write()
    a.disk.close()
    assert {f.stem for f in files(tmp_path)} == {k.hex() for k in keys}


def test_close_writes_what_waits(tmp_path: Path) -> None:
    a = Arena(tmp_path)
    keys = [a.fill(prompt(i, 32)) for i in range(10)]
    a.disk.close()
    assert {f.stem for f in files(tmp_path)} == {k.hex() for k in keys}


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "longer", "foreign", "swapped", "folder", "parent"])
def test_a_damaged_file_is_a_miss_and_goes(tmp_path: Path, damage: str, caplog: Any) -> None:
    a = Arena(tmp_path)
    one, two = prompt(1, 32), prompt(2, 32)
    k1, k2 = a.fill(one), a.fill(two)
    a.write()
    path = next(f for f in files(tmp_path) if f.stem == k1.hex())
    text = bytearray(path.read_bytes())
    parent = ROOT
    if damage == "flip":
        text[random.Random(1).randrange(len(text))] ^= 4
    elif damage == "truncate":
        del text[100:]
    elif damage == "empty":
        text.clear()
    elif damage == "longer":
        text += b"x"
    elif damage == "foreign":
        text[:] = os.urandom(len(text))
    elif damage == "swapped":
        text[:] = next(f for f in files(tmp_path) if f.stem == k2.hex()).read_bytes()
    elif damage == "parent":
        parent = k2
    path.write_bytes(text)
    if damage == "folder":
        path.unlink()
        path.mkdir()
    with caplog.at_level("WARNING", "milad"):
        assert a.read([k1], [parent], [one]) == []
    assert len(caplog.records) == 1 and "\n" not in caplog.records[0].getMessage()
    assert a.disk.stats()["n_bad"] == 1 and a.disk.probe([k1], 0) == 0
    assert a.read([k2], [ROOT], [two]) == [payload(two)]
    a.disk.close()


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    a = Arena(tmp_path)
    one = prompt(1, 32)
    key = a.fill(one)
    a.write()
    path = files(tmp_path)[0]
    good = path.read_bytes()
    assert len(good) == HEADER_BYTES + BLOCK_BYTES
    for at in range(len(good)):
        assert disk_module._problem(good[:at] + bytes((good[at] ^ (1 << at % 8),)) + good[at + 1:], key, ROOT,
                                    array("i", one).tobytes(), BLOCK_BYTES) is not None
        assert disk_module._problem(good[:at], key, ROOT, array("i", one).tobytes(), BLOCK_BYTES) is not None
    assert disk_module._problem(good, key, ROOT, array("i", one).tobytes(), BLOCK_BYTES) is None
    a.disk.close()


def test_a_full_disk_pauses_writing(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    now = [0.0]
    a = Arena(tmp_path, clock=lambda: now[0])
    real = os.replace

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with caplog.at_level("WARNING", "milad"):
        for i in range(5):
            a.fill(prompt(i, 32))
        a.write()
    assert len(caplog.records) == 1 and "No space left" in caplog.records[0].getMessage()
    assert not files(tmp_path) and not list(tmp_path.glob("*/*.tmp"))
    monkeypatch.setattr(os, "replace", real)
    a.fill(prompt(10, 32))
    a.write()
    assert not files(tmp_path)
    now[0] = 1000.0
    key = a.fill(prompt(11, 32))
    a.write()
    assert [f.stem for f in files(tmp_path)] == [key.hex()]
    now[0] = 2000.0
    a.disk.close()


def test_a_folder_that_cannot_be_made(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").write_text("")
    a = Arena(tmp_path / "file")
    with caplog.at_level("WARNING", "milad"):
        key = a.fill(prompt(1, 32))
        a.write()
    assert len(caplog.records) == 1
    assert a.disk.probe([key], 0) == 0 and survey(str(tmp_path / "file")) == []
    a.disk.close()


def test_the_cap_removes_the_longest_unused(tmp_path: Path) -> None:
    one_file = HEADER_BYTES + BLOCK_BYTES
    a = Arena(tmp_path, max_bytes=10 * one_file)
    keys = []
    for i in range(10):
        keys.append(a.fill(prompt(i, 32)))
        a.write()
        path = tmp_path / os.path.basename(a.disk.folder) / (keys[-1].hex() + ".kv")
        os.utime(path, (1000 + i, 1000 + i))
    assert a.read([keys[0]], [ROOT], [prompt(0, 32)])                               # used again: now the newest
    keys.append(a.fill(prompt(10, 32)))
    a.write()
    a.disk.close()
    left = {f.stem for f in files(tmp_path)}
    assert len(left) == 9 and keys[0].hex() in left and keys[10].hex() in left
    assert not {keys[1].hex(), keys[2].hex()} & left


def test_prune_and_survey_touch_only_their_own(tmp_path: Path) -> None:
    a = Arena(tmp_path)
    a.fill(prompt(1, 32))
    a.write()
    a.disk.close()
    folder = Path(a.disk.folder)
    (folder / "notes.txt").write_text("mine")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / ("0" * 32 + ".kv")).write_text("mine")
    stale, fresh = folder / ("a" * 32 + ".kv.1.tmp"), folder / ("b" * 32 + ".kv.2.tmp")
    for path in (stale, fresh):
        path.write_text("")
    os.utime(stale, (1, 1))
    found = survey(str(tmp_path))
    assert [(f["name"], f["n_files"], f["n_bytes"]) for f in found] == [(folder.name, 1, HEADER_BYTES + BLOCK_BYTES)]
    assert prune(str(tmp_path), 0) == (0, 1)
    assert not stale.exists() and fresh.exists() and (folder / "notes.txt").exists()
    assert (tmp_path / "photos" / ("0" * 32 + ".kv")).exists()


def engine(root: Path, n_blocks: int = 40) -> Engine:
    return Engine(FakeModel(), FakeContext(n_blocks, 64), post=lambda f, *a: f(*a), n_ctx=256, parallel=3,
                  disk_dir=str(root), disk_bytes=1 << 30)


def test_a_restarted_engine_knows_its_prompts(tmp_path: Path) -> None:
    e = engine(tmp_path)
    first = Reader(e, prompt(1, 200), 30, 3)
    first.assert_right()
    until(lambda: e.stats()["disk"]["n_written"] >= 6)
    assert e.stop()
    e = engine(tmp_path)
    readers = [Reader(e, prompt(1, 200), 30, 3) for _ in range(3)]
    for reader in readers:
        reader.assert_right()
        assert reader.wait().n_cached >= 192
    assert e.stats()["disk"]["n_read"] == 6
    assert e.stats()["n_prompt_tokens"] <= 3 * BLOCK
    assert e.stop()


def test_evicted_prefixes_come_back_too(tmp_path: Path) -> None:
    e = engine(tmp_path, 8)
    for i in (1, 2):
        Reader(e, prompt(i, 200), 5).assert_right()
        until(lambda: e.stats()["disk"]["n_written"] == 6 * i)
    again = Reader(e, prompt(1, 200), 5)
    again.assert_right()
    assert again.wait().n_cached >= 160
    assert e.stop()


def test_two_daemons_share_a_folder(tmp_path: Path) -> None:
    a, b = engine(tmp_path), engine(tmp_path)
    Reader(a, prompt(1, 200), 5).assert_right()
    until(lambda: a.stats()["disk"]["n_written"] == 6)
    other = Reader(b, prompt(1, 200), 5)
    other.assert_right()
    assert other.wait().n_cached >= 192
    assert a.stop() and b.stop()


def test_cancel_while_it_is_being_read(tmp_path: Path) -> None:
    e = engine(tmp_path)
    Reader(e, prompt(1, 200), 5).assert_right()
    assert e.stop()
    e = engine(tmp_path)
    gate = threading.Event()
    inner = e._disk._read
    e._disk._read = lambda *a: (gate.wait(10), inner(*a))[1]
    reader = Reader(e, prompt(1, 200), 5)
    until(lambda: e._disk._reads or len(e._scheduler.places.fetches))
    reader.handle.cancel()
    until(lambda: not e._live)
    gate.set()
    assert e.stats()["n_blocks_held"] == 0
    Reader(e, prompt(1, 200), 5).assert_right()
    assert e.stop()


WRITER = """
import sys
sys.path[:0] = [{root!r}, {here!r}]
from pathlib import Path
from test_disk import Arena, prompt
a = Arena(Path({folder!r}))
print("ready", flush=True)
i = 0
while True:
    a.fill(prompt(i % 40, 32))
    a.disk.idle()
    i += 1
"""


def test_kill_9_leaves_whole_files_or_none(tmp_path: Path) -> None:
    here = Path(__file__).resolve().parent
    code = WRITER.format(root=str(here.parent.parent), here=str(here), folder=str(tmp_path))
    r = random.Random(9)
    n_good = 0
    for n in range(int(os.environ.get("MILAD_KILLS", "5"))):
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        end = time.monotonic() + 20
        while n == 0 and time.monotonic() < end and not any(p.suffix != ".tmp" and p.is_file() for p in tmp_path.rglob("*")):
            time.sleep(0.001)       # once it is sure that something was written, however slow the machine
        time.sleep(r.random() * 0.03)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        a = Arena(tmp_path)
        for i in range(40):
            tokens = prompt(i, 32)
            key = chain(ROOT, array("i", tokens).tobytes())
            if a.disk.probe([key], 0):
                assert a.read([key], [ROOT], [tokens]) == [payload(tokens)]
                n_good += 1
        assert a.disk.stats()["n_bad"] == 0
        a.disk.close()
    assert n_good


def test_while_steps_run_the_writer_waits(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(disk_module, "QUEUE_BYTES", 8 * BLOCK_BYTES)
    now = [100.0]
    a = Arena(tmp_path, clock=lambda: now[0])
    a.disk.idle()
    a.disk.busy()
    keys = [a.fill(prompt(i, 32)) for i in range(16 + 3)]               # three are evicted: less than half of the queue
    now[0] += 5
    a.disk.busy()
    time.sleep(0.05)
    assert len(a.disk._writes) == 3 and not files(tmp_path)
    keys += [a.fill(prompt(i, 32)) for i in range(19, 21)]
    now[0] += 1
    a.disk.busy()                                                       # more than half: written before the next step
    assert {f.stem for f in files(tmp_path)} == {k.hex() for k in keys[:5]}
    now[0] += disk_module.AGE_S
    a.disk.busy()                                                       # no idle moment for long: the others, too
    assert {f.stem for f in files(tmp_path)} == {k.hex() for k in keys}
    a.disk.close()


def test_runs_longer_than_what_is_read_ahead(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(disk_module, "AHEAD_BYTES", 3 * BLOCK_BYTES)
    a = Arena(tmp_path)
    tokens, parents = [prompt(i, 32) for i in range(12)], [ROOT]
    for t in tokens:
        parents.append(a.fill(t, parents[-1]))
    a.write()
    assert a.read(parents[1:], parents[:-1], tokens) == [payload(t) for t in tokens]
    (Path(a.disk.folder) / (parents[8].hex() + ".kv")).unlink()
    assert a.read(parents[1:], parents[:-1], tokens) == [payload(t) for t in tokens[:7]]
    a.disk.close()


def test_the_arena_is_touched_before_it_is_read_into(tmp_path: Path) -> None:
    a = Arena(tmp_path)
    assert a.context.kv[0] == [None] * BLOCK
    for i in range(5):
        a.fill(prompt(i, 32))
    a.disk.close()
    b = Arena(tmp_path)
    assert [any(slot is not None for slot in block) for block in b.context.kv] == [True] * 5 + [False] * 11
    b.disk.close()
