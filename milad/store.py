"""Stored responses: one sqlite file in the state folder, 0600, for previous_response_id, GET, DELETE and input_items.

Owns the file's layout (below), its size and its age. Any thread may call; calls wait for one another and for the disk, so
the event loop calls through asyncio.to_thread. A file that sqlite can't read is renamed aside with one log line, never
repaired and never deleted; a full disk costs the answers that could not be kept, never a request. It must not know what
items mean.

    response   id, created (s), previous id or NULL, body and input: zlib of JSON, size: bytes of both
    item       id of an input or output item -> its response, for item references
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
import zlib
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Sequence, TypeVar

from . import log
from .errors import MiladError

VERSION = 1
FILE = "responses.sqlite3"
MAX_BYTES = 256 << 20          # of compressed bodies; the oldest go first
MAX_AGE_S = 30 * 86400         # as long as OpenAI keeps them
MAX_CHAIN = 2000               # responses behind one previous_response_id
MAX_HISTORY = 64 << 20         # characters of JSON that one chain may unpack to

_LAYOUT = """
CREATE TABLE response(seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, created INTEGER NOT NULL, previous TEXT,
                      body BLOB NOT NULL, input BLOB NOT NULL, size INTEGER NOT NULL);
CREATE TABLE item(id TEXT PRIMARY KEY, response TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX item_response ON item(response);
"""

_FAULTS = (sqlite3.Error, UnicodeDecodeError)  # the latter: the module decodes messages that quote a broken file

T = TypeVar("T")


class Store:
    def __init__(self, folder: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES, max_age_s: float = MAX_AGE_S) -> None:
        """Never raises for what the folder or the file is like: what can't be written is kept in memory, with a log line."""
        self.path = Path(folder) / FILE
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._lock = threading.Lock()
        self._db = self._open()
        self._bytes = 0
        self._bytes = self._do(lambda: int(self._db.execute("SELECT total(size) FROM response").fetchone()[0]))

    # -- calls ------------------------------------------------------------------------------------------------------------

    def put(self, body: Mapping[str, Any], items: Sequence[Mapping[str, Any]], previous: str | None = None) -> bool:
        """Keeps a response with its own input items. False: it could not be kept (logged)."""
        packed, given = _pack(body), _pack(items)
        size = len(packed) + len(given)
        if size > self._max_bytes:
            log.logger.warning("stored responses: %s is larger than the whole store may be, not kept", body["id"])
            return False
        names = [i["id"] for i in (*items, *body.get("output", ())) if isinstance(i.get("id"), str)]

        def write() -> bool:
            with self._db:                                       # one transaction
                self._forget("SELECT id FROM response WHERE id = ?", (body["id"],))
                self._db.execute("INSERT INTO response(id, created, previous, body, input, size) VALUES(?,?,?,?,?,?)",
                                 (body["id"], int(time.time()), previous, packed, given, size))
                self._db.executemany("INSERT OR REPLACE INTO item VALUES(?,?)", [(n, body["id"]) for n in names])
                self._bytes += size
                self._prune()
            return True
        try:
            return self._do(write)
        except MiladError:
            return False

    def get(self, response_id: str) -> dict[str, Any] | None:
        """The response object as it was sent; None: unknown."""
        row = self._do(lambda: self._row("body", response_id))
        return _unpack(row[0]) if row else None

    def input_items(self, response_id: str) -> list[dict[str, Any]] | None:
        row = self._do(lambda: self._row("input", response_id))
        return _unpack(row[0]) if row else None

    def delete(self, response_id: str) -> bool:
        """False: unknown. What followed it can no longer be continued."""
        def write() -> bool:
            with self._db:
                return self._forget("SELECT id FROM response WHERE id = ?", (response_id,)) > 0
        return self._do(write)

    def history(self, response_id: str) -> list[dict[str, Any]] | None:
        """Input and output items from the chain's first response up to this one; None where one is not here (any more)."""
        chain: list[list[dict[str, Any]]] = []
        n_chars = 0
        at: str | None = response_id
        while at is not None:
            row = self._do(lambda: self._row("body, input, previous", at))
            items = _items(row)
            if items is None:
                return None
            n_chars += len(row[0]) + len(row[1])
            if len(chain) >= MAX_CHAIN or n_chars > MAX_HISTORY:
                raise MiladError("invalid", "the chain of previous responses is too long", param="previous_response_id")
            chain.append(items)
            at = row[2]
        return [item for items in reversed(chain) for item in items]

    def items(self, item_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Input and output items by their ids, those that are here. A response is unpacked once, however many of its are named."""
        wanted = set(item_ids)
        owners = {row[0] for name in wanted
                  if (row := self._do(lambda: self._db.execute("SELECT response FROM item WHERE id = ?", (name,)).fetchone()))}
        found: dict[str, dict[str, Any]] = {}
        for owner in sorted(owners):
            for item in _items(self._do(lambda: self._row("body, input", owner))) or ():
                if item.get("id") in wanted:
                    found.setdefault(item["id"], item)
        return found

    def count(self) -> int:
        return self._do(lambda: self._db.execute("SELECT count(*) FROM response").fetchone()[0])

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # -- inside the lock --------------------------------------------------------------------------------------------------

    def _row(self, columns: str, response_id: str) -> Any:
        return self._db.execute(f"SELECT {columns} FROM response WHERE id = ? AND created >= ?",
                                (response_id, int(time.time() - self._max_age_s))).fetchone()

    def _forget(self, chosen: str, values: tuple[Any, ...]) -> int:
        """Deletes the responses that a SELECT of ids chooses. Returns how many."""
        ids = self._db.execute(chosen, values).fetchall()
        for (name,) in ids:
            self._db.execute("DELETE FROM item WHERE response = ?", (name,))
            row = self._db.execute("SELECT size FROM response WHERE id = ?", (name,)).fetchone()
            self._db.execute("DELETE FROM response WHERE id = ?", (name,))
            self._bytes -= row[0] if row and isinstance(row[0], int) else 0
        return len(ids)

    def _prune(self) -> None:
        self._forget("SELECT id FROM response WHERE created < ?", (int(time.time() - self._max_age_s),))
        while self._bytes > self._max_bytes:
            if not self._forget("SELECT id FROM response ORDER BY seq LIMIT 16", ()):
                break

    def _do(self, work: Callable[[], T]) -> T:
        """Runs `work` with the database to itself; a file that turns out broken is replaced, once."""
        with self._lock:
            try:
                return work()
            except _FAULTS as e:
                if _passing(e):
                    log.logger.warning("stored responses: %s: %s", self.path, e)
                    raise MiladError("unavailable", "stored responses can't be read or written right now",
                                     retry_after_s=1) from e
                self._db.close()
                self._aside(e)
                self._db, self._bytes = self._open(), 0
                try:
                    return work()
                except _FAULTS as again:
                    raise MiladError("unavailable", "stored responses can't be read or written") from again

    # -- the file ---------------------------------------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                return self._connect()
            except _FAULTS as e:
                if _passing(e):
                    raise
                self._aside(e)
                return self._connect()
        except (OSError, *_FAULTS) as e:
            log.logger.warning("stored responses are kept in memory only: %s: %s", self.path, e)
            return _prepared(sqlite3.connect(":memory:", check_same_thread=False))

    def _connect(self) -> sqlite3.Connection:
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600))
        os.chmod(self.path, 0o600)                               # sqlite's own files beside it take over these bits
        db = sqlite3.connect(self.path, timeout=5, check_same_thread=False)
        try:
            return _prepared(db)
        except BaseException:
            db.close()
            raise

    def _aside(self, why: object) -> None:
        """Renames the file and its journal, so that somebody may look at them."""
        to = self.path.with_name(f"{FILE}.broken-{int(time.time())}")
        log.logger.warning("stored responses: %s is unusable (%s): moved to %s", self.path, why, to.name)
        for end in ("", "-wal", "-shm"):
            try:
                os.replace(f"{self.path}{end}", f"{to}{end}")
            except FileNotFoundError:
                pass


def _passing(error: Exception) -> bool:
    """Whether the file itself may be sound: busy, full, read-only, out of reach, closed. (Error codes came with Python 3.11.)"""
    words = ("locked", "busy", "full", "readonly", "disk i/o", "unable to open", "closed database", "interrupted")
    return isinstance(error, (sqlite3.OperationalError, sqlite3.ProgrammingError)) and \
        any(w in str(error).lower() for w in words)


def _prepared(db: sqlite3.Connection) -> sqlite3.Connection:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    tables = {r[0] for r in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables and version == 0:
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(f"BEGIN;{_LAYOUT}PRAGMA user_version = {VERSION};COMMIT;")
    elif version != VERSION or not {"response", "item"} <= tables:
        raise sqlite3.DatabaseError(f"layout {version}, not {VERSION}")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("PRAGMA secure_delete = ON")                      # what is deleted is gone from the file
    return db


def _items(row: Any) -> list[dict[str, Any]] | None:
    """Input and output items of a (body, input, ...) row; None for none, or one that does not hold what it should."""
    body, given = (_unpack(row[0]), _unpack(row[1])) if row else (None, None)
    if not isinstance(body, dict) or not isinstance(given, list):
        return None
    return [i for i in (*given, *body.get("output", ())) if isinstance(i, dict)]


def _pack(value: Any) -> bytes:
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)


def _unpack(data: bytes) -> Any:
    """None for a row that does not hold what it should."""
    try:
        return json.loads(zlib.decompress(data))
    except (zlib.error, ValueError, TypeError):
        return None
