"""Fetches one file by HTTP so that it is whole or not there: resumed after cuts, stalls and kills, checked, renamed at the end.

While it is fetched, NAME lies in its folder as `.NAME.part`, locked, with `.NAME.part.json` beside it: where it is from and
which version (ETag, size, SHA-256). A part of another version is thrown away. Redirects are followed, never from https to
http, and credentials are sent to the first origin only. Blocking; the caller's thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import json
import os
import re
import shutil
import socket
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Callable
from urllib.parse import urlsplit

from . import __version__
from .errors import UsageError

STALL_S = 30.0
N_TRIES = 8                      # without a byte of progress
N_RESTARTS = 4                   # from zero: a server whose answers do not fit together is no progress
SPARE = 64 << 20                 # bytes of disk that stay free
CHUNK = 1 << 18
_SHA256 = re.compile(r"[0-9a-f]{64}")

Progress = Callable[[int, int], None]           # bytes so far, bytes in all (0: unknown)


@dataclass
class Version:
    """What a part belongs to. 0 and "": the server does not say."""
    url: str
    size: int = 0
    etag: str = ""
    sha256: str = ""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Remembers what hubs say of a file in the answer that redirects to its bytes."""

    max_redirections = 10

    def __init__(self) -> None:
        self.linked: dict[str, str] = {}

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        for name in ("x-linked-etag", "x-linked-size"):
            if headers.get(name):
                self.linked.setdefault(name, headers[name])
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if new.scheme not in ("http", "https") or (old.scheme, new.scheme) == ("https", "http"):
            raise UsageError(f"{old.hostname} redirects to {new.scheme}://{new.hostname}, which is not as safe: refused")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and (old.scheme, old.netloc) != (new.scheme, new.netloc):
            request.remove_header("Authorization")
        return request


def open_url(url: str, headers: dict[str, str], timeout_s: float = STALL_S) -> tuple[Any, dict[str, str]]:
    """(response, what redirects said). urllib's errors come through."""
    redirects = _Redirects()
    opener = urllib.request.build_opener(redirects)
    sent = {"User-Agent": f"milad/{__version__}", "Accept-Encoding": "identity", **headers}
    return opener.open(urllib.request.Request(url, headers=sent), timeout=timeout_s), redirects.linked


def shown(url: str) -> str:
    """For errors: without a signed query, which is as good as a key."""
    return urlsplit(url)._replace(query="", fragment="").geturl()[:300]


def check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        right = False
    if not right:
        raise UsageError(f"{url.partition('?')[0][:200]}: not an http:// or https:// address")
    if parts.username or parts.password:
        raise UsageError(f"{parts.scheme}://...@{parts.hostname}: addresses with a name or password in them are not used")


class _Changed(Exception):
    """The server has another version, or its answer does not continue the part: from the start."""


class _Download:
    def __init__(self, url: str, target: Path, *, size: int, sha256: str, headers: dict[str, str], progress: Progress,
                 stall_s: float, sleep: Callable[[float], None]) -> None:
        check_url(url)
        self.target = target
        self.part = target.with_name(f".{target.name}.part")
        self.meta = target.with_name(f".{target.name}.part.json")
        self.known = Version(url, size, "", sha256)      # by the caller
        self.version = replace(self.known)               # and what the server adds
        self.headers = headers
        self.progress = progress
        self.stall_s = stall_s
        self.sleep = sleep

    def run(self) -> None:
        with open(self.part, "a+b", buffering=0) as out:
            try:
                fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"{self.target.name} is being fetched by another process") from None
            if not os.path.exists(self.part) or os.stat(self.part).st_ino != os.fstat(out.fileno()).st_ino:
                raise UsageError(f"{self.target.name} was fetched by another process just now")
            resumed = self._adopt(out)
            digest = self._fetch(out)
            if not self._right(digest):
                if not resumed:
                    self._discard()
                    raise UsageError(f"{self.target.name}: its SHA-256 is {digest}, not {self.version.sha256}: thrown away")
                self._from_zero(out)         # the part may have been damaged, by a power cut for one
                if not self._right(digest := self._fetch(out)):
                    self._discard()
                    raise UsageError(f"{self.target.name}: its SHA-256 is {digest}, not {self.version.sha256}: thrown away")
            os.fsync(out.fileno())
            os.chmod(self.part, 0o644)
            os.replace(self.part, self.target)
            with contextlib.suppress(OSError):
                os.unlink(self.meta)
            folder = os.open(self.target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _right(self, digest: str) -> bool:
        return not self.version.sha256 or digest == self.version.sha256

    def _discard(self) -> None:
        for path in (self.part, self.meta):
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _adopt(self, out: Any) -> bool:
        """Is what lies there a part of this file? If not it is emptied."""
        try:
            old = Version(**json.loads(self.meta.read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            old = Version("")
        same = all(not mine or not theirs or mine == theirs for mine, theirs in (
            (self.version.size, old.size), (self.version.sha256, old.sha256)))
        if old.url != self.version.url or not same:
            self._restart(out)
            return False
        self.version = Version(self.version.url, self.version.size or old.size, old.etag, self.version.sha256 or old.sha256)
        return os.fstat(out.fileno()).st_size > 0

    def _restart(self, out: Any) -> None:
        os.ftruncate(out.fileno(), 0)

    def _fetch(self, out: Any) -> str:
        """Until the part is whole; its SHA-256."""
        digest, n = hashlib.sha256(), 0
        out.seek(0)
        while chunk := out.read(1 << 20):
            digest.update(chunk)
            n += len(chunk)
        n_failed = n_restarts = 0
        while not (self.version.size and n == self.version.size):
            if self.version.size and n > self.version.size:
                n, digest = self._from_zero(out)
            before = n
            try:
                n, done = self._try(out, digest, n)
                if done:
                    break
                raise ConnectionError("the connection ended early")
            except _Changed as e:
                n, digest = self._from_zero(out)
                reason: Exception = e
                n_restarts += 1
            except (urllib.error.URLError, OSError, http.client.HTTPException) as e:
                n = os.fstat(out.fileno()).st_size
                reason = e
            n_failed = n_failed + 1 if n <= before else 1
            if isinstance(reason, urllib.error.HTTPError) and reason.code < 500 and reason.code not in (408, 425, 429):
                raise UsageError(f"{shown(self.version.url)}: {reason.code} {reason.reason}{_hint(reason.code)}") from None
            if isinstance(getattr(reason, "reason", None), (ssl.SSLCertVerificationError, socket.gaierror)) \
                    or n_failed >= N_TRIES or n_restarts >= N_RESTARTS:
                raise UsageError(f"{shown(self.version.url)}: {getattr(reason, 'reason', None) or reason or type(reason).__name__}; what came "
                                 "is kept, the same command goes on from there") from None
            self.sleep(min(30.0, 0.5 * 2 ** n_failed))
        return digest.hexdigest()

    def _from_zero(self, out: Any) -> tuple[int, Any]:
        self._restart(out)
        self.version = replace(self.known)
        return 0, hashlib.sha256()

    def _try(self, out: Any, digest: Any, n: int) -> tuple[int, bool]:
        """One request: (bytes there are, the file is whole)."""
        version = self.version
        headers = dict(self.headers)
        if n:
            headers["Range"] = f"bytes={n}-"
            if version.etag and not version.etag.startswith("W/"):
                headers["If-Range"] = version.etag
        try:
            response, linked = open_url(version.url, headers, self.stall_s)
        except urllib.error.HTTPError as e:
            if e.code == 416 and n:
                raise _Changed("the part is longer than the file") from None
            raise
        with response:
            self._check(response, linked, n)
            self._save()
            self._space(n)
            expected = response.length               # of this answer; None: until the connection ends
            got = 0
            while chunk := response.read1(CHUNK):
                if version.size and n + len(chunk) > version.size:
                    raise _Changed("more bytes than the file has")
                self._write(out, chunk)
                digest.update(chunk)
                n += len(chunk)
                got += len(chunk)
                self.progress(n, version.size)
            if version.size:
                return n, n == version.size
            return n, expected is None or got == expected

    def _write(self, out: Any, chunk: bytes) -> None:
        """A full disk takes a part of it: the next try reads what is there."""
        view = memoryview(chunk)
        try:
            while view:
                view = view[out.write(view):]
        except OSError as e:
            raise UsageError(f"{self.part}: {e.strerror}; what came is kept") from None

    def _check(self, response: Any, linked: dict[str, str], n: int) -> None:
        """Does the answer belong to this version and begin where the part ends?"""
        version = self.version
        if response.status == 206:
            found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", response.headers.get("Content-Range", ""))
            if not n or not found or int(found[1]) != n:
                raise _Changed("an answer of another range")
            total = int(found[3]) if found[3] != "*" else 0
        elif response.status == 200:
            if n:
                raise _Changed("the server does not resume, or has another version")
            total = response.length or 0
        else:
            raise UsageError(f"{shown(version.url)}: unexpected answer {response.status}")
        if linked.get("x-linked-size", "").isdigit():
            total = total or int(linked["x-linked-size"])
        if version.size and total and total != version.size:
            if n:
                raise _Changed("another size")
            raise UsageError(f"{shown(version.url)}: the server has {total} bytes, {version.size} were expected")
        version.size = version.size or total
        etag = response.headers.get("ETag", "")
        sha256 = next((t for t in (_plain(linked.get("x-linked-etag", "")), _plain(etag)) if _SHA256.fullmatch(t)), "")
        if n and version.etag and etag and etag != version.etag:
            raise _Changed("another version")
        version.etag = etag or version.etag
        version.sha256 = version.sha256 or sha256

    def _save(self) -> None:
        new = self.meta.with_name(self.meta.name + ".new")
        new.write_text(json.dumps(asdict(self.version)), "utf-8")
        os.replace(new, self.meta)

    def _space(self, n: int) -> None:
        free = shutil.disk_usage(self.target.parent).free
        if self.version.size and free < self.version.size - n + SPARE:
            raise UsageError(f"{self.target.parent}: {free >> 20} MiB are free, {(self.version.size - n + SPARE) >> 20} MiB are "
                             f"needed for {self.target.name}")


def _plain(etag: str) -> str:
    return etag.removeprefix("W/").strip('"').lower()


def _hint(code: int) -> str:
    return {401: "; set HF_TOKEN where the model asks for it", 403: "; the token may not read this, or its terms are not agreed to",
            404: "; is it spelled right?"}.get(code, "")


def fetch(url: str, target: Path, *, size: int = 0, sha256: str = "", headers: dict[str, str] | None = None,
          progress: Progress = lambda done, total: None, stall_s: float = STALL_S,
          sleep: Callable[[float], None] | None = None) -> str:
    """url's file as `target`. size, sha256: where they are known beforehand. Returns the SHA-256 that was checked, "" where
    neither the caller nor the server knew one. UsageError in one line; what came stays for the next try."""
    download = _Download(url, target, size=size, sha256=sha256.lower(), headers=headers or {}, progress=progress,
                         stall_s=stall_s, sleep=sleep or time.sleep)
    try:
        download.run()
    except OSError as e:
        raise UsageError(f"{e.filename or target}: {e.strerror or e}") from e
    return download.version.sha256
