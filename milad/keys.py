"""API keys: the file that holds them, who a request belongs to, and what each key may do.

File format, one key a line, `#` begins a comment:

    NAME sha256:SALT:HEX [parallel=N] [rpm=N]

NAME: 1 to 64 of [A-Za-z0-9._-]. SALT: 16 bytes in hex. HEX: SHA-256 of SALT's bytes and the key. One fast hash is enough:
keys are made here with 256 bits of entropy, or given with at least 20 characters. parallel: answers at once; rpm: requests a
minute. The file must be nobody's but its owner's (no permission for group and others). Keys themselves are never kept, shown
or logged; `add` hands a new one out once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import stat
import time
from dataclasses import dataclass
from typing import Callable, Iterator

from .errors import MiladError, UsageError
from .http import guard
from .http.wire import Request

PREFIX = "sk-milad-"
MIN_LENGTH = 20
MAX_FILE = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH = re.compile(r"sha256:([0-9a-f]{32}):([0-9a-f]{64})")


@dataclass(frozen=True)
class Key:
    name: str
    salt: bytes
    digest: bytes
    parallel: int = 0                        # 0: no limit of its own
    rpm: int = 0

    def line(self) -> str:
        limits = "".join(f" {n}={v}" for n, v in (("parallel", self.parallel), ("rpm", self.rpm)) if v)
        return f"{self.name} sha256:{self.salt.hex()}:{self.digest.hex()}{limits}"


def make(name: str, key: str | None = None, parallel: int = 0, rpm: int = 0) -> tuple[Key, str]:
    """A new entry and its key; `key`: one of the person's own. UsageError where it is too weak or the name is none."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name[:80]!r} is no name for a key: 1 to 64 letters, digits and . _ -")
    if key is None:
        key = PREFIX + secrets.token_urlsafe(32)
    elif len(key) < MIN_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(f"a key needs at least {MIN_LENGTH} printable ASCII characters without blanks")
    salt = secrets.token_bytes(16)
    return Key(name, salt, hashlib.sha256(salt + key.encode()).digest(), parallel, rpm), key


def parse(text: str, source: str) -> list[Key]:
    """UsageError names file and line, never the line's content."""
    found: dict[str, Key] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        hashed = _HASH.fullmatch(words[1]) if len(words) > 1 else None
        limits = [re.fullmatch(r"(parallel|rpm)=([1-9][0-9]{0,6})", w) for w in words[2:]]
        if not _NAME.fullmatch(words[0]) or not hashed or not all(limits):
            raise UsageError(f"{source}: line {number} is not NAME sha256:SALT:HASH [parallel=N] [rpm=N]; "
                             "`milad key add` writes such lines")
        if words[0] in found:
            raise UsageError(f"{source}: line {number}: there is a key {words[0]} already")
        found[words[0]] = Key(words[0], bytes.fromhex(hashed[1]), bytes.fromhex(hashed[2]),
                              **{m[1]: int(m[2]) for m in limits if m})
    return list(found.values())


def _read(fd: int, path: str) -> str:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path}: not a regular file")
    if status.st_mode & 0o077:
        raise UsageError(f"{path}: others may read or change it (mode {stat.S_IMODE(status.st_mode):04o}): chmod 600 {path}")
    data = os.pread(fd, MAX_FILE + 1, 0)
    if len(data) > MAX_FILE:
        raise UsageError(f"{path}: longer than {MAX_FILE >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        raise UsageError(f"{path}: {e}") from e


def load(path: str) -> list[Key]:
    """The file's keys. UsageError where it can't be read, others may read it, or a line is wrong."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        raise UsageError(f"{path}: {e.strerror}") from e
    try:
        return parse(_read(fd, path), path)
    finally:
        os.close(fd)


def change(path: str, edit: Callable[[list[str]], list[str]]) -> None:
    """Replaces the file's lines by edit(lines), whole or not at all; others that change it wait."""
    folder = os.path.dirname(path) or "."
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise UsageError(f"{folder}: {e.strerror}") from e
    new = f"{path}.{secrets.token_hex(4)}"
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines: list[str] = []
        owner = None
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                lines, owner = _read(fd, path).splitlines(), os.fstat(fd)
            finally:
                os.close(fd)
        parse("\n".join(lines), path)
        text = "".join(line + "\n" for line in edit(lines))
        out = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(out, "w") as f:
            if owner and (owner.st_uid, owner.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(f.fileno(), owner.st_uid, owner.st_gid)   # root edits the daemon's file: it stays the daemon's
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(new, path)
    except OSError as e:
        raise UsageError(f"{e.filename or path}: {e.strerror or e}") from e
    finally:
        with contextlib.suppress(OSError):
            os.unlink(new)
        os.close(lock)


class Ring:
    """Who a request belongs to, and each key's limits. replace() takes a reloaded file; counts go on."""

    def __init__(self, keys: list[Key], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: dict[str, int] = {}
        self._budget: dict[str, tuple[float, float]] = {}      # name -> requests left, as of when
        self.replace(keys)

    def replace(self, keys: list[Key]) -> None:
        self._keys = {k.name: k for k in keys}
        self._budget = {n: b for n, b in self._budget.items() if n in self._keys}

    def __len__(self) -> int:
        return len(self._keys)

    def auth(self, request: Request) -> str | None:
        """guard.Auth: every key is compared whatever the first ones gave."""
        found = None
        for sent in guard.keys_of(request):
            raw = sent.encode("latin-1", "replace")
            for key in self._keys.values():
                if hmac.compare_digest(hashlib.sha256(key.salt + raw).digest(), key.digest):
                    found = key.name
        return found

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """One request of that key's, from its start to its end. MiladError rate_limited beyond the key's limits."""
        key = self._keys.get(name)
        if key and key.parallel and self._running.get(name, 0) >= key.parallel:
            raise MiladError("rate_limited", f"the key {name} has {key.parallel} requests running, which is its limit",
                             retry_after_s=1)
        if key and key.rpm:
            now = self._clock()
            left, since = self._budget.get(name, (float(key.rpm), now))
            left = min(key.rpm, left + (now - since) * key.rpm / 60)
            if left < 1:
                raise MiladError("rate_limited", f"the key {name} may send {key.rpm} requests a minute",
                                 retry_after_s=min(60, int((1 - left) * 60 / key.rpm) + 1))
            self._budget[name] = left - 1, now
        self._running[name] = self._running.get(name, 0) + 1
        try:
            yield
        finally:
            self._running[name] -= 1
            if not self._running[name]:
                del self._running[name]
