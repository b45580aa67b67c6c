"""The keys file: format, permissions, hashes, changes, limits."""

from __future__ import annotations

import os
import random
import threading
from types import SimpleNamespace

import pytest

from milad import keys
from milad.errors import MiladError, UsageError


def request(**fields: str):
    return SimpleNamespace(get=lambda name: fields.get(name.replace("-", "_")))


def test_a_key_and_its_line_round_trip():
    entry, key = keys.make("alice", parallel=2, rpm=60)
    assert key.startswith(keys.PREFIX) and len(key) > 40 and key not in entry.line()
    assert keys.parse(f"# a comment\n\n  {entry.line()}  # hers\n", "f") == [entry]


def test_the_right_key_and_only_it():
    (a, key_a), (b, key_b) = keys.make("a"), keys.make("b")
    ring = keys.Ring([a, b])
    assert ring.auth(request(authorization=f"Bearer {key_a}")) == "a"
    assert ring.auth(request(x_api_key=key_b)) == "b"
    for wrong in ("", key_a[:-1], key_a + "x", a.digest.hex(), a.line(), "é" * 40):
        assert ring.auth(request(x_api_key=wrong, authorization=f"Bearer {wrong}")) is None
    assert ring.auth(request()) is None and keys.Ring([]).auth(request(x_api_key=key_a)) is None
    ring.replace([b])
    assert ring.auth(request(x_api_key=key_a)) is None and ring.auth(request(x_api_key=key_b)) == "b"


def test_equal_keys_have_unequal_hashes():
    one, two = (keys.make(n, "x" * 20)[0] for n in "ab")
    assert one.digest != two.digest and one.salt != two.salt


@pytest.mark.parametrize("name,key", [("", None), ("a b", None), ("../x", None), ("a" * 65, None), ("ok", "short"),
                                      ("ok", "x" * 19), ("ok", "with blank " * 4), ("ok", "ü" * 30), ("ok", "x" * 30 + "\n")])
def test_bad_names_and_weak_keys(name, key):
    with pytest.raises(UsageError):
        keys.make(name, key)


def test_errors_name_the_line_and_do_not_quote_it():
    good = keys.make("a")[0].line()
    for bad in ("a secret-plain-key", "a", good + " rpm=0", good + " parallel=x", good + " more", good[:-1], "a b c " + good,
                good + "\n" + good):
        with pytest.raises(UsageError, match=r"keys: line \d") as e:
            keys.parse(bad, "keys")
        assert "secret" not in str(e.value) and "sha256:" + good[9:20] not in str(e.value)


def test_seeded_damage_is_refused_or_means_the_same():
    rng = random.Random(7)
    good = keys.make("name")[0].line()
    for _ in range(2000):
        at = rng.randrange(len(good))
        text = good[:at] + chr(rng.randrange(256)) + good[at + 1:]
        try:
            for key in keys.parse(text, "f"):
                assert keys.parse(key.line(), "f") == [key]
        except UsageError:
            pass


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o620])
def test_a_file_that_others_may_read_is_refused(tmp_path, mode):
    path = tmp_path / "keys"
    path.write_text(keys.make("a")[0].line())
    path.chmod(mode)
    with pytest.raises(UsageError, match="chmod 600"):
        keys.load(str(path))
    path.chmod(0o600)
    assert [k.name for k in keys.load(str(path))] == ["a"]


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in ("none", "fifo", "."):
        with pytest.raises(UsageError):
            keys.load(str(tmp_path / path))


def test_changes_keep_comments_and_mode_and_never_get_lost(tmp_path):
    path = tmp_path / "keys"

    def add(name: str) -> None:
        keys.change(str(path), lambda lines: [*lines, keys.make(name)[0].line()])

    keys.change(str(path), lambda lines: ["# ours"])
    threads = [threading.Thread(target=add, args=(f"k{i}",)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text().startswith("# ours\n") and path.stat().st_mode & 0o777 == 0o600
    assert {k.name for k in keys.load(str(path))} == {f"k{i}" for i in range(12)}
    assert os.listdir(tmp_path) == ["keys"]

    def fail(lines):
        raise UsageError("no")

    before = path.read_text()
    with pytest.raises(UsageError):
        keys.change(str(path), fail)
    assert path.read_text() == before and os.listdir(tmp_path) == ["keys"]


def test_limits():
    now = [0.0]
    ring = keys.Ring([keys.make("p", parallel=1)[0], keys.make("r", rpm=2)[0], keys.make("free")[0]], clock=lambda: now[0])
    with ring.hold("p"):
        with pytest.raises(MiladError) as e, ring.hold("p"):
            pass
        assert e.value.kind == "rate_limited" and e.value.retry_after_s == 1
    with ring.hold("p"):
        pass
    for _ in range(2):
        with ring.hold("r"):
            pass
    with pytest.raises(MiladError) as e, ring.hold("r"):
        pass
    assert e.value.retry_after_s and 1 <= e.value.retry_after_s <= 60
    now[0] += e.value.retry_after_s            # the promise is kept
    with ring.hold("r"):
        pass
    for _ in range(100):
        with ring.hold("free"), ring.hold("somebody else"):
            pass
    assert not ring._running
