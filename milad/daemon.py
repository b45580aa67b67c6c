"""The daemon's life: listen, load, tell the service manager, serve, drain, end.

Listening begins before the model is loaded, so that a port in use is told at once and /health can say how far loading is.
SIGTERM and SIGINT drain: running answers get drain_timeout, then end with their protocol's own error event; a second signal
ends at once. SIGUSR1 writes the engine's state to the log.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from typing import Any, Mapping

from . import __version__, catalogue, loader, log
from .app import App, Served, Settings
from .errors import UsageError
from .http import server, wire
from .options import Value

EXIT_FORCED = 1


def serve(options: Mapping[str, Value]) -> int:
    """Runs until told to end. UsageError for what is wrong with options, model or address."""
    return asyncio.run(_Daemon(options).run())


class Notify:
    """sd_notify(3): datagrams to $NOTIFY_SOCKET; silent where there is none."""

    def __init__(self) -> None:
        self._address = os.environ.pop("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):
            self._address = "\0" + self._address[1:]

    def __call__(self, *lines: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.sendto("\n".join(lines).encode(), self._address)
        except OSError as e:
            log.once("notify", "can't tell the service manager: %s", e)


def inherited_sockets() -> list[socket.socket]:
    """Sockets of a service manager's socket unit (sd_listen_fds(3)): they begin at descriptor 3."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    try:
        n = int(os.environ.get("LISTEN_FDS", "0"))
    except ValueError:
        return []
    return [socket.socket(fileno=fd) for fd in range(3, 3 + n)]


class _Daemon:
    def __init__(self, options: Mapping[str, Value]) -> None:
        self.options = options
        self.value = {name: v.value for name, v in options.items()}
        self.notify = Notify()
        self.loaded: loader.Loaded | None = None
        self.started = time.monotonic()

    async def run(self) -> int:
        value = self.value
        loop = asyncio.get_running_loop()
        self.stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_end, number)
        loop.add_signal_handler(signal.SIGUSR1, self._dump)
        app = App(Settings(keepalive_s=value["keepalive"], body_limit=value["body_limit"],
                           allowed_hosts=value["allowed_hosts"], allowed_origins=value["allowed_origins"],
                           strict_model_names=value["strict_model_names"],
                           access_log=lambda line: log.logger.info("%s", line)), store=_store())
        self.server = server.Server(app, server.Settings(limits=wire.Limits(body=value["body_limit"])))
        name, path = catalogue.resolve(value["model"][0] if value["model"] else None)   # before anything else: cheap to be wrong
        sockets = inherited_sockets() or self._bind()
        await self.server.listen(sockets)
        self.notify(f"STATUS=loading {name}")
        load = loop.create_task(asyncio.to_thread(loader.load, self.options, post=loop.call_soon_threadsafe,
                                                  progress=self._progress(app, loop)))
        stop = loop.create_task(self.stop.wait())
        await asyncio.wait({load, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not load.done():                    # told to end while loading: the thread can't be called back
            await self.server.drain(0)
            sys.stderr.flush()
            os._exit(0)
        try:
            self.loaded = load.result()
        except UsageError:
            await self.server.drain(0)
            raise
        self._serve(app)
        watchdog = loop.create_task(self._watchdog())
        await stop
        watchdog.cancel()
        await self._drain()
        return 0

    def _bind(self) -> list[socket.socket]:
        host = self.value["host"]
        if host.startswith("unix:"):
            return [server.bind_unix(host[5:])]
        return server.bind_tcp(host, self.value["port"])

    def _progress(self, app: App, loop: asyncio.AbstractEventLoop):
        """Loading's share for /health and, on a terminal, a bar."""
        from .progress import bar
        show = bar("loading")

        def progress(share: float) -> None:
            app.loading = share
            show(share)
        return progress

    def _serve(self, app: App) -> None:
        loaded = self.loaded
        assert loaded is not None
        app.served = Served(loaded.name, loaded.runner, loaded.path, n_slots=loaded.sizes.parallel, created=int(time.time()))
        url = self._url()
        stat = loaded.context.stat()
        room = loaded.sizes.n_blocks * 32 // max(1, loaded.sizes.n_ctx)
        log.logger.info("milad %s serves %s (%s) at %s: %s tokens a request, for %d at once%s, %s", __version__, loaded.name,
                        loaded.runner.family.name, url, f"{loaded.sizes.n_ctx:,}", loaded.sizes.parallel,
                        "" if room >= loaded.sizes.parallel else f" (memory holds {room} full ones)",
                        f"script {self.value['script']}" if self.value["script"]
                        else f"{stat['n_threads']} threads, {stat['isa']}, ready after {time.monotonic() - self.started:.1f} s")
        if sys.stderr.isatty() and url.startswith("http"):
            print(f"\n  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
                  "    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello!\"}]}'\n", file=sys.stderr)
        self.notify("READY=1", f"STATUS=serving {loaded.name} at {url}")

    def _url(self) -> str:
        if self.server.ports:
            host = self.value["host"]
            shown = "127.0.0.1" if host in ("", "*", "0.0.0.0") else f"[{host}]" if ":" in host else host
            return f"http://{shown}:{self.server.ports[0]}"
        return self.value["host"]

    def _asked_to_end(self, number: int) -> None:
        if self.stop.is_set():
            log.logger.warning("asked again to end: ending now")
            os._exit(EXIT_FORCED)
        log.logger.info("%s: finishing what runs (at most %g s; once more ends at once)", signal.Signals(number).name,
                        self.value["drain_timeout"])
        self.stop.set()

    def _dump(self) -> None:
        if self.loaded:
            for line in self.loaded.engine.dump().splitlines():
                log.logger.info("state: %s", line)

    async def _watchdog(self) -> None:
        """Keeps the service manager's watchdog (WATCHDOG_USEC) content while the engine thread moves."""
        try:
            period_s = int(os.environ.get("WATCHDOG_USEC", "0")) / 2e6
        except ValueError:
            period_s = 0
        while period_s > 0:
            assert self.loaded is not None
            if self.loaded.engine.stalled_s() < 60:
                self.notify("WATCHDOG=1")
            await asyncio.sleep(period_s)

    async def _drain(self) -> None:
        self.notify("STOPPING=1")
        await self.server.drain(self.value["drain_timeout"])
        if self.loaded:
            await asyncio.to_thread(self.loaded.close)
        log.logger.info("ended")


def _store() -> Any:
    """Stored responses, in the state folder."""
    try:
        from .store import Store
    except ImportError:
        return None
    return Store(catalogue.data_folder("STATE", ".local/state"))
