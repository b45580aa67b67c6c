"""How an engine's thread hands calls to the event loop: a deque and one eventfd that the loop watches.

asyncio's own call_soon_threadsafe gives the GIL up while it writes to its socket pair: the woken loop takes it, and the engine's
thread, which only wants to begin its next step, waits until the token is with its reader (150 microseconds of each step). Here the
write keeps the GIL, and the loop gets it when the step begins.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from typing import Any, Callable

FAR_BEHIND = 256        # calls: a script's steps take no time, and would be thousands ahead of a reader that stalls or leaves
_ONE = (1).to_bytes(8, "little")


def _writer() -> Callable[[int, bytes, int], int] | None:
    """write(2) without releasing the GIL: of an eventfd it never blocks. None: this system has no eventfd."""
    if not hasattr(os, "eventfd"):
        return None
    try:
        import ctypes
        write = ctypes.PyDLL(None).write
    except (ImportError, OSError, AttributeError):
        return None
    write.argtypes, write.restype = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t), ctypes.c_ssize_t
    return write


class Mailbox:
    """post() from any thread; made and closed on the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._closed = False
        self._fd = -1
        self._write = _writer()
        if self._write is not None:
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            loop.add_reader(self._fd, self._run)

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        """Calls it on the loop's thread, in the order of posting. RuntimeError: the mailbox or the loop is closed."""
        if self._closed or self._loop.is_closed():
            raise RuntimeError("nobody empties this mailbox any more")
        if self._write is None:
            self._loop.call_soon_threadsafe(function, *args)
            return
        self._calls.append((function, args))
        self._write(self._fd, _ONE, 8)
        if len(self._calls) > FAR_BEHIND:
            time.sleep(0.001)                # and no longer: the loop may be waiting for this thread's end

    def _run(self) -> None:
        os.eventfd_read(self._fd)
        for _ in range(len(self._calls)):
            function, args = self._calls.popleft()
            try:
                function(*args)
            except Exception as e:
                self._loop.call_exception_handler({"message": "a call from another thread failed", "exception": e})

    def close(self) -> None:
        if not self._closed and self._fd >= 0:
            self._loop.remove_reader(self._fd)
        self._closed = True

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)           # not before: another thread might be writing to it
