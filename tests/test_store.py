"""Stored responses: what is kept, for how long, by whom, and what becomes of a broken file."""

from __future__ import annotations

import os
import random
import sqlite3
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from milad import store as store_module
from milad.errors import MiladError
from milad.store import FILE, Store


def response(name: str, text: str = "answer") -> dict[str, Any]:
    return {"id": name, "object": "response", "output": [
        {"id": f"msg_{name}", "type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]}


def given(name: str, text: str = "question") -> list[dict[str, Any]]:
    return [{"id": f"in_{name}", "type": "message", "role": "user", "content": text}]


def test_what_was_put_comes_back_after_a_restart(tmp_path: Path) -> None:
    first = Store(tmp_path / "state")
    assert first.put(response("resp_1", "é🎉\ud800"), given("resp_1"))
    first.close()
    again = Store(tmp_path / "state")
    assert again.get("resp_1") == response("resp_1", "é🎉\ud800") and again.input_items("resp_1") == given("resp_1")
    assert {k: v["role"] for k, v in again.items(["msg_resp_1", "x", "in_resp_1"]).items()} == {"msg_resp_1": "assistant", "in_resp_1": "user"}
    assert again.get("resp_2") is None and again.input_items("resp_2") is None
    for end in ("", "-wal", "-shm"):
        path = tmp_path / "state" / (FILE + end)
        assert not path.exists() or stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(tmp_path / "state").st_mode) == 0o700


def test_a_chain_gives_items_oldest_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    previous = None
    for i in range(5):
        store.put(response(f"resp_{i}", f"a{i}"), given(f"resp_{i}", f"q{i}"), previous)
        previous = f"resp_{i}"
    assert [i["id"] for i in store.history("resp_2")] == [
        "in_resp_0", "msg_resp_0", "in_resp_1", "msg_resp_1", "in_resp_2", "msg_resp_2"]
    assert store.history("resp_9") is None
    assert store.delete("resp_1") and not store.delete("resp_1") and store.get("resp_1") is None
    assert store.history("resp_2") is None and store.history("resp_0") is not None and not store.items(["msg_resp_1"])


def test_a_chain_in_a_circle_ends(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put(response("a"), given("a"), "b")
    store.put(response("b"), given("b"), "a")
    with pytest.raises(MiladError) as e:
        store.history("a")
    assert e.value.status == 400


def test_the_same_id_again_replaces(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put(response("a", "old"), given("a"))
    store.put(response("a", "new"), given("a"))
    assert store.count() == 1 and store.get("a")["output"][0]["content"][0]["text"] == "new"


def test_the_oldest_go_when_there_is_too_much(tmp_path: Path) -> None:
    rng = random.Random(1)
    store = Store(tmp_path, max_bytes=200_000)
    for i in range(60):
        store.put(response(f"r{i}", rng.randbytes(6000).hex()), given(f"r{i}"))
    assert 0 < store.count() < 60 and store.get("r0") is None and store.get("r59") is not None
    assert not store.items(["msg_r0"])
    kept = store.count()
    store.close()
    assert Store(tmp_path, max_bytes=200_000).count() == kept
    assert not Store(tmp_path, max_bytes=1000).put(response("big", rng.randbytes(6000).hex()), [])


def test_the_old_go_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1e9]
    monkeypatch.setattr(store_module.time, "time", lambda: now[0])
    store = Store(tmp_path, max_age_s=100)
    store.put(response("a"), given("a"))
    now[0] += 99
    assert store.get("a") is not None
    now[0] += 10
    assert store.get("a") is None and store.history("a") is None
    store.put(response("b"), given("b"))
    assert store.count() == 1


@pytest.mark.parametrize("junk", [b"", b"no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 4000, b"\0" * 8192])
def test_a_broken_file_is_moved_aside(tmp_path: Path, junk: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE).write_bytes(junk)
    store = Store(tmp_path)
    assert store.put(response("a"), given("a")) and store.get("a")
    aside = list(tmp_path.glob(FILE + ".broken-*"))
    assert bool(aside) == bool(junk.strip(b"\0")) or junk.startswith(b"\0")
    assert all(p.read_bytes() == junk for p in aside)


def test_a_file_that_breaks_later_is_moved_aside_too(tmp_path: Path) -> None:
    rng = random.Random(2)
    store = Store(tmp_path)
    for i in range(50):
        store.put(response(f"r{i}", rng.randbytes(3000).hex()), given(f"r{i}"))
    store.close()
    data = bytearray((tmp_path / FILE).read_bytes())
    data[4096:] = bytes(len(data) - 4096)                        # the first page, and so the layout, stays whole
    (tmp_path / FILE).write_bytes(data)
    store = Store(tmp_path)
    for i in range(50):
        assert store.get(f"r{i}") is None
    assert store.put(response("new"), given("new")) and store.get("new") is not None
    assert len(list(tmp_path.glob(FILE + ".broken-*"))) == 1


@pytest.mark.parametrize("seed", range(20))
def test_flipped_bytes_never_raise(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    store = Store(tmp_path)
    for i in range(10):
        store.put(response(f"r{i}", rng.randbytes(500).hex()), given(f"r{i}"), f"r{i - 1}" if i else None)
    store.close()
    data = bytearray((tmp_path / FILE).read_bytes())
    for _ in range(200):
        data[rng.randrange(len(data))] = rng.randrange(256)
    (tmp_path / FILE).write_bytes(data)
    store = Store(tmp_path)
    for i in range(10):
        for call in (store.get, store.input_items, store.history, store.delete):
            try:
                call(f"r{i}")
            except MiladError as e:
                assert e.kind in ("unavailable", "invalid")
        store.put(response(f"n{i}"), given(f"n{i}"))


def test_another_layout_is_left_alone(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / FILE)
    db.execute("CREATE TABLE mine(x)")
    db.commit()
    db.close()
    assert Store(tmp_path).put(response("a"), given("a"))
    aside, = tmp_path.glob(FILE + ".broken-*")
    assert sqlite3.connect(aside).execute("SELECT name FROM sqlite_master").fetchall() == [("mine",)]


def test_a_folder_that_can_not_be_written_leaves_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "state")
    assert store.put(response("a"), given("a")) and store.get("a") is not None


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"")
    (tmp_path / FILE).symlink_to(tmp_path / "elsewhere")
    Store(tmp_path).put(response("a"), given("a"))
    assert (tmp_path / "elsewhere").read_bytes() == b""


def test_threads(tmp_path: Path) -> None:
    store = Store(tmp_path)
    faults: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for i in range(20):
                store.put(response(f"t{n}_{i}"), given(f"t{n}_{i}"), f"t{n}_{i - 1}" if i else None)
                assert len(store.history(f"t{n}_{i}")) == 2 * (i + 1)
        except BaseException as e:
            faults.append(e)
    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and store.count() == 160


def test_two_stores_on_one_file(tmp_path: Path) -> None:
    one, two = Store(tmp_path), Store(tmp_path)
    one.put(response("a"), given("a"))
    assert two.get("a") is not None
    two.put(response("b"), given("b"), "a")
    assert len(one.history("b")) == 4
