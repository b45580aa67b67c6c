"""The prefix cache's second tier: KV blocks as files, so that known prompts survive restarts and eviction.

    DIR/<fingerprint>-<kv type>-<layout>/<block key>.kv      one block: HEADER, the payload

    HEADER  magic 8 | block key 16 | parent key 16 | tokens 32 x int32 | payload bytes u64 | sha256 of all before and the payload

Rules
- The name says what a file must contain and its header and checksum are compared on every read: a file that is damaged,
  truncated or somebody else's is a miss with one log line, never an error. Files are written beside and renamed into place, so
  kill -9 leaves whole files or a .tmp; after a power cut the checksum decides. sha256: with the CPU's own instructions
  it is three times as fast as blake2b (1.17 against 0.36 GB/s here).
- Blocks are copied out of the arena when the engine is idle, when one is evicted, and at the end; a thread writes them, others
  read. What does not fit the writer's queue in time is not written: the cache is a convenience.
- The writer works while the engine is idle. A step is cut into hundreds of stages that all cores finish together: whoever takes
  one of them for a moment stops all. So while steps run it writes between them, the engine waiting, and only what can't wait:
  copies that fill half of the queue, blocks that have seen no idle moment for AGE_S; for SHARE of the time at most.
- No room, no rights: one log line, and no writes for PAUSE_S. Above max_bytes the longest unused files go (mtime is set on
  reading). Several daemons may share DIR: names are content, and a file that vanishes is a miss.
- Files hold what people asked: folders are 0700, files 0600.

Uses threads and the file system; on_* and idle() are the engine thread's. Must not know sequences or the scheduler.
"""

from __future__ import annotations

import os
import re
import struct
import threading
import time
from collections import OrderedDict, deque
from hashlib import sha256
from typing import Any, Callable, Iterator

from .. import log
from .base import Context
from .blocks import BYTES, Blocks

MAGIC = b"miladKV1"
_HEAD = struct.Struct(f"<8s16s16s{BYTES}sQ")
HEADER_BYTES = _HEAD.size + 32
_NAME = re.compile(r"[0-9a-f]{32}\.kv")
_FOLDER = re.compile(r"[0-9a-f]{16}-[A-Za-z0-9_.+-]+")
QUEUE_BYTES = 16 << 20      # copied out, waiting for the writer: memory is the model's
AHEAD_BYTES = 16 << 20      # read, waiting for the engine
AGE_S = 10.0                # kill -9 costs no more than the blocks of so long, and what fits half of the queue
SHARE = 0.05
WINDOW_S = 0.02             # longest wait of the engine for the writer
WARM_BYTES = 256 << 20
READERS = 2                 # the checksum takes as long as reading from memory
IDLE_S = 0.002              # of copying before the engine looks whether somebody came
PAUSE_S = 60.0
STALE_S = 600.0             # age of a .tmp that nobody is writing any more
CLOSE_S = 0.7             # at the end: SIGTERM has 5 s, of which a drain takes 4
PRUNE_TO = 0.9              # of max_bytes


class Ticket:
    """A run of blocks on its way from the disk: the readers append payloads in order, the engine takes them."""

    def __init__(self, keys: list[bytes], parents: list[bytes], datas: list[bytes]) -> None:
        self.keys = keys
        self.parents = parents
        self.datas = datas                  # tokens of each block
        self.loaded: deque[memoryview] = deque()
        self.n_taken = 0
        self.n_begun = self.n_landed = 0    # blocks that a reader has taken on, that were appended
        self.early: dict[int, memoryview | None] = {}       # read before those in front of them; None: a miss
        self.done = False                   # no more payloads will come
        self.cancelled = False


class Disk:
    def __init__(self, folder: str, max_bytes: int, *, fingerprint: int, kv_type: str, layout: str, block_bytes: int,
                 wake: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        """layout: whatever else makes two builds' blocks differ. wake: called by the threads when the engine has something to
        do again. Nothing is touched on disk before the first block is written."""
        self.root = folder
        self.folder = os.path.join(folder, f"{fingerprint:016x}-{kv_type}-{re.sub('[^A-Za-z0-9_.+-]', '_', layout)}")
        self.max_bytes = max_bytes
        self.n_read = self.n_written = self.n_bad = self.n_dropped = self.n_pruned = 0
        self.n_bytes = 0                    # of all files under root, as last counted
        self._block_bytes = block_bytes
        self._wake = wake
        self._clock = clock
        self._blocks: Blocks | None = None
        self._context: Context | None = None
        self._pending: OrderedDict[bytes, tuple[int, bytes, bytes]] = OrderedDict()     # key -> (block, parent, tokens)
        self._bad: set[bytes] = set()       # damaged files that could not be removed
        self._lock = threading.Condition()
        self._writes: deque[tuple[bytes, bytes, bytes, bytes]] = deque()
        self._n_queued = 0                  # bytes in _writes and in the writer's hands
        self._reads: deque[Ticket] = deque()
        self._paused_until = 0.0
        self._idle_at = clock()             # when the engine was last idle
        self._window_at = 0.0               # when the writer's last turn between steps ended
        self._step_at = 0.0                 # when the last step was planned
        self._open_until = float("inf")     # the writer may begin a file until then
        self._closing = False
        self._threads: list[threading.Thread] = []

    # -- the engine thread ------------------------------------------------------------------------------------------------

    def attach(self, blocks: Blocks, context: Context) -> None:
        """The arena whose blocks are kept; called again when the engine starts with empty books."""
        self._pending.clear()
        if self._context is None:
            self._warm(context)
        self._blocks, self._context = blocks, context
        blocks.on_full = self._on_full
        blocks.on_evict = self._on_evict

    def _warm(self, context: Context) -> None:
        """Touches as much of the arena as there is to be read: the first memory of a process comes slowly, above all to a
        virtual machine (0.5 s for 150 MB), and whoever comes back after a restart waits for it."""
        try:
            n = min(len(os.listdir(self.folder)), WARM_BYTES // self._block_bytes, context.n_blocks)
        except OSError:
            return
        empty = bytes(self._block_bytes)

        def touch(first: int, end: int) -> None:
            for block in range(first, end):
                context.kv_write(block, empty)

        threads = [threading.Thread(target=touch, args=(n * i // READERS, n * (i + 1) // READERS)) for i in range(READERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _on_full(self, block: int, key: bytes, parent: bytes, data: bytes) -> None:
        self._pending[key] = block, parent, data

    def _on_evict(self, block: int, key: bytes, parent: bytes, data: bytes) -> None:
        if self._pending.pop(key, None) is not None:
            self._copy_out(block, key, parent, data)

    def idle(self) -> bool:
        """Copies blocks out for a moment. True: there is more to do right now."""
        now = self._idle_at = self._clock()
        end = now + IDLE_S
        if self._open_until != float("inf"):
            with self._lock:
                self._open_until = float("inf")
                self._lock.notify_all()
        while self._pending and self._has_room():
            key, (block, parent, data) = self._pending.popitem(last=False)
            self._copy_out(block, key, parent, data)
            if self._clock() >= end:
                return bool(self._pending) and self._has_room()
        return False

    def busy(self) -> None:
        """A step is about to run: the writer waits, or has its turn first."""
        now = self._clock()
        length_s, self._step_at = now - self._step_at, now
        self._open_until = 0.0
        old = now - self._idle_at > AGE_S
        if not (old and self._pending or self._n_queued > QUEUE_BYTES // 2 or old and self._n_queued):
            return
        room_s = min(SHARE * (now - max(self._window_at, self._idle_at)), max(length_s / 2, IDLE_S), WINDOW_S)
        if room_s < IDLE_S:
            return
        end = now + room_s
        with self._lock:
            self._open_until = end
            while (left := end - self._clock()) > 0:
                if old and self._pending and self._has_room():
                    key, (block, parent, data) = self._pending.popitem(last=False)
                    self._copy_out(block, key, parent, data)
                elif not self._n_queued:
                    break
                self._lock.notify_all()
                self._lock.wait(left)
            self._open_until = 0.0
        self._window_at = self._clock()

    def _has_room(self) -> bool:
        return self._n_queued + self._block_bytes <= QUEUE_BYTES or not self._n_queued

    def _copy_out(self, block: int, key: bytes, parent: bytes, data: bytes) -> None:
        if self._closing or self._clock() < self._paused_until or not self._has_room():
            self.n_dropped += 1
            return
        if self._blocks.lookup(key) != block or self._exists(key):
            return
        payload = self._context.kv_read(block)
        with self._lock:
            self._writes.append((key, parent, data, payload))
            self._n_queued += len(payload)
            self._start("milad-kv-write", self._write_loop)
            self._lock.notify_all()

    def probe(self, keys: list[bytes], first: int) -> int:
        """How many blocks from keys[first] on are there."""
        n = first
        while n < len(keys) and keys[n] not in self._bad and self._exists(keys[n]):
            n += 1
        return n - first

    def fetch(self, keys: list[bytes], parents: list[bytes], datas: list[bytes]) -> Ticket:
        """Starts reading a run of blocks; wake() is called as they come."""
        ticket = Ticket(keys, parents, datas)
        with self._lock:
            self._reads.append(ticket)
            for i in range(READERS):
                self._start(f"milad-kv-read-{i}", self._read_loop)
            self._lock.notify_all()
        return ticket

    def take(self, ticket: Ticket) -> memoryview:
        """The next loaded payload."""
        payload = ticket.loaded.popleft()
        ticket.n_taken += 1
        with self._lock:
            self._lock.notify_all()
        return payload

    def close(self) -> None:
        """Writes what is waiting, for at most CLOSE_S."""
        end = self._clock() + CLOSE_S
        with self._lock:
            self._open_until = float("inf")
            self._lock.notify_all()
        while self._pending and self._clock() < end:
            if self._clock() < self._paused_until:
                break
            if self._has_room():
                key, (block, parent, data) = self._pending.popitem(last=False)
                self._copy_out(block, key, parent, data)
            else:
                with self._lock:
                    self._lock.wait(0.05)
        with self._lock:
            while self._n_queued and self._clock() < end:
                self._lock.wait(max(0.0, end - self._clock()))
            self._closing = True
            self._writes.clear()
            for ticket in self._reads:
                ticket.done = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join(1.0)

    def stats(self) -> dict[str, int]:
        return {"n_read": self.n_read, "n_written": self.n_written, "n_bad": self.n_bad, "n_dropped": self.n_dropped,
                "n_pruned": self.n_pruned, "n_bytes": self.n_bytes, "n_waiting": len(self._pending)}

    # -- the threads ------------------------------------------------------------------------------------------------------

    def _start(self, name: str, target: Callable[[], None]) -> None:
        if not any(t.name == name for t in self._threads):
            thread = threading.Thread(target=target, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _path(self, key: bytes) -> str:
        return os.path.join(self.folder, key.hex() + ".kv")

    def _exists(self, key: bytes) -> bool:
        return os.path.exists(self._path(key))

    def _write_loop(self) -> None:
        since_count = self._count()
        while True:
            with self._lock:
                while not self._writes or self._clock() >= self._open_until:
                    if self._closing:
                        return
                    self._lock.wait()
                key, parent, data, payload = self._writes.popleft()
            try:
                if self._clock() >= self._paused_until:
                    self._write(key, parent, data, payload)
                    since_count += HEADER_BYTES + len(payload)
                    self.n_bytes += HEADER_BYTES + len(payload)
                    if self.n_bytes > self.max_bytes or since_count > self.max_bytes // 8:
                        since_count = self._count()
            except OSError as e:
                self._paused_until = self._clock() + PAUSE_S
                log.logger.warning("the prompt cache on disk %s can't be written (%s); next try in %d s", self.root,
                                   e.strerror or e, PAUSE_S)
            finally:
                with self._lock:
                    self._n_queued -= len(payload)
                    self._lock.notify_all()
                self._wake()

    def _write(self, key: bytes, parent: bytes, data: bytes, payload: bytes) -> None:
        path = self._path(key)
        if os.path.exists(path):
            return
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        head = _HEAD.pack(MAGIC, key, parent, data, len(payload))
        digest = sha256(head)
        digest.update(payload)
        beside = f"{path}.{os.getpid()}.tmp"
        try:
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0) as f:
                for part in (head, digest.digest(), payload):
                    view = memoryview(part)
                    while view:
                        view = view[f.write(view):]
            os.replace(beside, path)
        except OSError:
            try:
                os.unlink(beside)
            except OSError:
                pass
            raise
        self.n_written += 1

    def _count(self) -> int:
        """Counts what is there and prunes it; 0 (bytes since)."""
        self.n_bytes, n_pruned = prune(self.root, self.max_bytes, to=PRUNE_TO)
        self.n_pruned += n_pruned
        return 0

    def _read_loop(self) -> None:
        while True:
            with self._lock:
                while (begun := self._next_read()) is None:
                    if self._closing:
                        return
                    self._lock.wait()
            ticket, i = begun
            payload = None
            try:
                payload = self._read(ticket.keys[i], ticket.parents[i], ticket.datas[i])
            finally:
                with self._lock:
                    self._landed(ticket, i, payload)
                self._wake()

    def _next_read(self) -> tuple[Ticket, int] | None:
        """The block to read next; tickets that need no more leave. Under the lock."""
        while self._reads:
            ticket = self._reads[0]
            if ticket.cancelled or self._closing or ticket.done:
                ticket.done = True
            elif ticket.n_begun < len(ticket.keys):
                if (ticket.n_begun - ticket.n_taken) * self._block_bytes > AHEAD_BYTES:
                    return None
                ticket.n_begun += 1
                return ticket, ticket.n_begun - 1
            self._reads.popleft()
        return None

    def _landed(self, ticket: Ticket, i: int, payload: memoryview | None) -> None:
        """Hands on what came in the order of the run, up to the first miss. Under the lock."""
        ticket.early[i] = payload
        while not (ticket.done or ticket.cancelled) and ticket.n_landed in ticket.early:
            payload = ticket.early.pop(ticket.n_landed)
            if payload is None:
                ticket.done = True
                break
            ticket.loaded.append(payload)
            ticket.n_landed += 1
            self.n_read += 1
        if ticket.n_landed == len(ticket.keys):
            ticket.done = True
        self._lock.notify_all()

    def _read(self, key: bytes, parent: bytes, data: bytes) -> memoryview | None:
        """A block's payload if the file is what its name says; None: a miss."""
        path = self._path(key)
        try:
            with open(path, "rb", buffering=0) as f:
                size = os.fstat(f.fileno()).st_size
                text = f.readall() if size == HEADER_BYTES + self._block_bytes else b""
                problem = _problem(text, key, parent, data, self._block_bytes)
                if problem is None:
                    try:
                        os.utime(f.fileno())
                    except OSError:
                        pass
                    return memoryview(text)[HEADER_BYTES:]
        except FileNotFoundError:
            return None
        except OSError as e:
            problem = e.strerror or str(e)
        self.n_bad += 1
        log.logger.warning("the cached prompt block %s is not usable: %s", path, problem)
        self._bad.add(key)
        try:
            os.unlink(path)
            self._bad.discard(key)
        except OSError:
            pass
        return None


def _problem(text: bytes, key: bytes, parent: bytes, data: bytes, n_bytes: int) -> str | None:
    if len(text) != HEADER_BYTES + n_bytes:
        return "it is truncated or of another size"
    magic, has_key, has_parent, has_data, has_bytes = _HEAD.unpack_from(text)
    if magic != MAGIC or has_bytes != n_bytes:
        return "it has another format"
    digest = sha256(memoryview(text)[:_HEAD.size])
    digest.update(memoryview(text)[HEADER_BYTES:])
    if digest.digest() != text[_HEAD.size:HEADER_BYTES]:
        return "its checksum is wrong"
    if (has_key, has_parent, has_data) != (key, parent, data):
        return "it holds another block"
    return None


# For people: `milad cache`.


def survey(root: str) -> list[dict[str, Any]]:
    """Per model folder: name, n_files, n_bytes, oldest and newest use (Unix seconds). Only what this module wrote."""
    found = []
    for folder in _folders(root):
        files = list(_files(folder))
        if files:
            times = [t for t, _, _ in files]
            found.append({"name": os.path.basename(folder), "n_files": len(files), "n_bytes": sum(n for _, n, _ in files),
                          "oldest": min(times), "newest": max(times)})
    return sorted(found, key=lambda f: f["newest"], reverse=True)


def prune(root: str, max_bytes: int, *, to: float = 1.0) -> tuple[int, int]:
    """Above max_bytes removes the longest unused files until to * max_bytes are left; removes stale .tmp files and empty folders.
    Returns (bytes left, files removed). Touches nothing that this module did not write."""
    files: list[tuple[float, int, str]] = []
    for folder in _folders(root):
        files += _files(folder)
        _sweep(folder)
    n_bytes, n_pruned = sum(n for _, n, _ in files), 0
    if n_bytes > max_bytes:
        for _, n, path in sorted(files):
            if n_bytes <= to * max_bytes:
                break
            try:
                os.unlink(path)
                n_pruned += 1
            except FileNotFoundError:
                pass
            except OSError:
                continue
            n_bytes -= n
        for folder in _folders(root):
            try:
                os.rmdir(folder)
            except OSError:
                pass
    return n_bytes, n_pruned


def _folders(root: str) -> list[str]:
    try:
        with os.scandir(root) as entries:
            return [e.path for e in entries if _FOLDER.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _files(folder: str) -> Iterator[tuple[float, int, str]]:
    """(mtime, bytes, path)"""
    try:
        with os.scandir(folder) as entries:
            for e in entries:
                if _NAME.fullmatch(e.name):
                    try:
                        status = e.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    yield status.st_mtime, status.st_size, e.path
    except OSError:
        return


def _sweep(folder: str) -> None:
    """Removes what a killed daemon left half written."""
    try:
        with os.scandir(folder) as entries:
            for e in entries:
                if e.name.endswith(".tmp") and _NAME.match(e.name) and e.stat().st_mtime < time.time() - STALE_S:
                    os.unlink(e.path)
    except OSError:
        pass
