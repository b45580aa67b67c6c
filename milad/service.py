"""What a service manager expects of a daemon: sd_notify, inherited sockets, a locked pid file, enough file descriptors."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket
import time

from . import log
from .errors import UsageError


class Notify:
    """sd_notify(3): datagrams to $NOTIFY_SOCKET; silent where there is none. Any thread."""

    def __init__(self) -> None:
        self._address = os.environ.pop("NOTIFY_SOCKET", "")       # popped: it is ours, not our children's
        if self._address.startswith("@"):
            self._address = "\0" + self._address[1:]
        self._told_at = 0.0

    def __call__(self, *lines: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.settimeout(1)
                sock.sendto("\n".join(lines).encode(), self._address)
        except OSError as e:
            log.once("notify", "can't tell the service manager: %s", e)

    def loading(self, name: str, share: float) -> None:
        """Once a second at most: how far loading is, and that the start may take this much longer."""
        now = time.monotonic()
        if now - self._told_at >= 1:
            self._told_at = now
            self(f"STATUS=loading {name}: {share:.0%}", "EXTEND_TIMEOUT_USEC=30000000")

    def reloading(self) -> None:
        self("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")


def watchdog_s() -> float:
    """How often the service manager wants a sign of life, halved as sd_watchdog_enabled(3) advises; 0: never."""
    try:
        if int(os.environ.get("WATCHDOG_PID", os.getpid())) != os.getpid():
            return 0.0
        return max(0, int(os.environ.get("WATCHDOG_USEC", "0"))) / 2e6
    except ValueError:
        return 0.0


def inherited_sockets() -> list[socket.socket]:
    """Sockets of a service manager's socket unit (sd_listen_fds(3)): they begin at descriptor 3. Their variables are removed,
    so that no child takes them for its own. UsageError for a descriptor that is no listening stream socket."""
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "0")
    if pid != str(os.getpid()) or not count.isdigit():
        return []
    found = []
    for i in range(int(count)):
        name = names[i] if i < len(names) and names[i] else f"descriptor {3 + i}"
        try:
            os.set_inheritable(3 + i, False)
            sock = socket.socket(fileno=3 + i)
            listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError as e:
            raise UsageError(f"the service manager's socket {name} can't be used: {e.strerror}") from None
        if sock.type != socket.SOCK_STREAM or not listening:
            raise UsageError(f"the service manager's socket {name} is no listening stream socket (Accept=no, ListenStream=)")
        found.append(sock)
    return found


class PidFile:
    """A file with the process id, locked until close(), which removes it. UsageError where another daemon holds it."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            while True:
                self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
                try:
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    pid = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
                    os.close(self._fd)
                    raise UsageError(f"{path}: a milad runs already, process {log.escape(pid) or 'unknown'}") from None
                with contextlib.suppress(OSError):
                    if os.stat(path).st_ino == os.fstat(self._fd).st_ino:
                        break
                os.close(self._fd)           # the one that ended took the file away between open and lock
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as e:
            raise UsageError(f"{path}: {e.strerror}") from None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        os.close(self._fd)


def raise_descriptor_limit(wanted: int) -> None:
    """The soft limit up to `wanted`, as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
