"""The daemon's life: listen, load, tell the service manager, serve, reload, drain, end.

Listening begins before the model is loaded, so that a port in use is told at once and /health can say how far loading is.
SIGTERM and SIGINT drain: running answers get drain_timeout, then end with their protocol's own error event; a second signal
ends at once. SIGHUP reads the configuration again (reload.py). SIGUSR1 writes the engine's state to the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import sys
import time
from pathlib import Path
from typing import Any, Callable, Mapping

from . import __version__, catalogue, loader, log, service
from .access import check_exposed, check_group
from .app import App, Served, Settings
from .engine.loop import STALL_S
from .errors import UsageError
from .gate import Gate, apis
from .http import server, tls, wire
from .keys import Ring, load as load_keys
from .mailbox import Mailbox
from .metrics import Metrics, prometheus, status
from .models import Models, resolve as resolve_models, size_of
from .options import BY_NAME, Value

ENDING = (signal.SIGTERM, signal.SIGINT)
EXIT_FORCED = 3         # asked twice to end: running answers were cut
DESCRIPTORS_BESIDE = 128        # besides connections: model, cache, store, log, libraries

Options = Mapping[str, Value]


def serve(options: Options, reread: Callable[[], Options] | None = None) -> int:
    """Runs until told to end. UsageError for what is wrong with options, files, model or address. reread: the configuration
    anew, for SIGHUP."""
    # Held back until run() has its handlers: asyncio's own would cancel a task that may be past noticing.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        return asyncio.run(_Daemon(options, reread).run())
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def check(options: Options) -> list[str]:
    """`milad serve -t`: everything short of listening and loading. UsageError says what is wrong; the lines say what is there."""
    value = values(options)
    found = []
    for name, path in resolve_models(options, loader.models_folder(value)):
        with contextlib.suppress(OSError), open(path, "rb") as f:
            if f.read(4) != b"GGUF":
                raise UsageError(f"{path}: not a GGUF file")
        found.append(f"model {name}: {path}")
    if value["keys_file"]:
        found.append(f"keys: {len(load_keys(value['keys_file']))}")
    if value["tls_cert"]:
        tls.context(value["tls_cert"], value["tls_key"])
        found.append("certificate and key belong together")
    for address in addresses(value):
        check_exposed(address, value)
    if value["socket_group"]:
        check_group(value["socket_group"])
    return found


def values(options: Options) -> dict[str, Any]:
    return {name: v.value for name, v in options.items()}


def addresses(value: Mapping[str, Any]) -> list[str]:
    """What `host` names: one address, or several with commas between."""
    return [part.strip() for part in value["host"].split(",")] or [""]


class _Daemon:
    def __init__(self, options: Options, reread: Callable[[], Options] | None) -> None:
        self.options = options
        self.value = values(options)
        self.reread = reread
        self.notify = service.Notify()
        self.loaded: loader.Loaded | None = None
        self.models: Models | None = None
        self.ssl: ssl.SSLContext | None = None
        self.pid_file: service.PidFile | None = None
        self.unix_paths: list[str] = []
        self.metrics = Metrics()
        self.started = time.monotonic()

    async def run(self) -> int:
        value = self.value
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_log_unhandled)
        self.mailbox = Mailbox(loop)
        self.stop = asyncio.Event()
        for number in ENDING:
            loop.add_signal_handler(number, self._asked_to_end, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        loop.add_signal_handler(signal.SIGUSR1, self._dump)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        resolved = resolve_models(self.options, loader.models_folder(value))      # before anything else: cheap to be wrong
        self._security()
        if value["pid_file"]:
            self.pid_file = service.PidFile(value["pid_file"])
        try:
            return await self._serve(resolved, loop)
        finally:
            self._tidy()
            self.mailbox.close()

    def _tidy(self) -> None:
        for path in self.unix_paths:
            with contextlib.suppress(OSError):
                os.unlink(path)
        self.unix_paths = []
        if self.pid_file:
            self.pid_file.close()
            self.pid_file = None

    def _security(self) -> None:
        value = self.value
        self.app = App(Settings(access_log=lambda line: log.logger.info("%s", line),
                                metrics=lambda: prometheus(*self._state()), status=lambda: status(*self._state()), fault=self._fault),
                       store=_store())
        self.gate = Gate(self.app, self.metrics)
        self._apply(value)
        if value["tls_cert"]:
            self.ssl = tls.context(value["tls_cert"], value["tls_key"])
        if self.gate.ring is not None and not len(self.gate.ring):
            log.logger.warning("%s holds no key yet: every request is refused until `milad key add`", value["keys_file"])

    def _state(self) -> tuple[Any, ...]:
        """What metrics and status are made of."""
        return (self.metrics, self.app.served, self.app.loading, self._n_connections(), self.models.loaded() if self.models else ())

    def _n_connections(self) -> int:
        return len(self.server.connections)

    def _apply(self, value: Mapping[str, Any]) -> None:
        """The options that a running daemon can take. UsageError before anything is changed."""
        keys = load_keys(value["keys_file"]) if value["keys_file"] else None
        if self.ssl and value["tls_cert"]:
            tls.load(self.ssl, value["tls_cert"], value["tls_key"])
        settings, gate = self.app.settings, self.gate
        if keys is None:
            gate.ring = None
        elif gate.ring is None:
            gate.ring = Ring(keys)
        else:
            gate.ring.replace(keys)
        settings.auth = gate.ring.auth if gate.ring is not None else None
        settings.keepalive_s, settings.body_limit = value["keepalive"], value["body_limit"]
        settings.allowed_hosts, settings.allowed_origins = value["allowed_hosts"], value["allowed_origins"]
        settings.strict_model_names = value["strict_model_names"]
        gate.apis, gate.log_prompts = apis(value["protocols"]), value["log_prompts"]

    # Serving

    async def _serve(self, resolved: list[tuple[str, Path]], loop: asyncio.AbstractEventLoop) -> int:
        value = self.value
        name = resolved[0][0]
        service.raise_descriptor_limit(value["max_connections"] * 2 + DESCRIPTORS_BESIDE)
        self.server = server.Server(self.gate, server.Settings(limits=wire.Limits(body=value["body_limit"]),
                                                               max_connections=value["max_connections"]))
        await self._listen()
        self.notify(f"STATUS=loading {name}")
        load = loop.create_task(asyncio.to_thread(loader.load, self.options, post=self.mailbox.post,
                                                  progress=self._progress(name)))
        stop = loop.create_task(self.stop.wait())
        await asyncio.wait({load, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not load.done():                    # told to end while loading: the thread can't be called back
            self.notify("STOPPING=1")
            await self.server.drain(0)
            self._tidy()
            log.logger.info("ended while loading")
            sys.stderr.flush()
            os._exit(0)
        try:
            self.loaded = load.result()
        except BaseException:
            await self.server.drain(0)
            raise
        if len(resolved) > 1:
            self.models = Models(resolved[1:], self.options, post=self.mailbox.post, watch=self.metrics.watch, first=self._first_bytes)
            self.app.pool = self.models
        self._ready()
        tasks = [loop.create_task(self._watchdog())] + ([loop.create_task(self.models.watch_idle())] if self.models else [])
        await stop
        for task in tasks:
            task.cancel()
        await self._drain()
        return 0

    async def _listen(self) -> None:
        """TLS, where it is on, is for TCP; a unix socket is guarded by its permissions."""
        sockets = service.inherited_sockets()
        for sock in sockets:
            if sock.family != socket.AF_UNIX:
                check_exposed(sock.getsockname()[0], self.value)
        if not sockets:
            for address in addresses(self.value):
                check_exposed(address, self.value)
            for address in addresses(self.value):
                sockets += self._bind(address)
        local = [s for s in sockets if s.family == socket.AF_UNIX]
        await self.server.listen(local)
        await self.server.listen([s for s in sockets if s not in local], ssl=self.ssl)

    def _bind(self, address: str) -> list[socket.socket]:
        if not address.startswith("unix:"):
            return server.bind_tcp(address, self.value["port"])
        path = address[5:]
        group = self.value["socket_group"]
        sock = server.bind_unix(path, 0o600 if group else self.value["socket_mode"])
        self.unix_paths.append(path)
        if group:                              # the group first: the mode opens the socket to it
            try:
                os.chown(path, -1, check_group(group))
                os.chmod(path, self.value["socket_mode"])
            except OSError as e:
                raise UsageError(f"{path}: can't give the socket to the group {group}: {e.strerror}") from None
        return [sock]

    def _first_bytes(self) -> int:
        assert self.loaded is not None
        return size_of(self.loaded)

    def _progress(self, name: str) -> Callable[[float], None]:
        """Loading's share for /health, the service manager and, on a terminal, a bar."""
        from .progress import bar
        show = bar("loading")

        def progress(share: float) -> None:
            self.app.loading = share
            self.notify.loading(name, share)
            show(share)
        return progress

    def _ready(self) -> None:
        loaded = self.loaded
        assert loaded is not None
        self.app.served = Served(loaded.name, self.metrics.watch(loaded.runner), loaded.path, self.value["model_aliases"],
                                 n_slots=loaded.sizes.parallel, created=int(time.time()))
        url = self._url()
        stat = loaded.context.stat()
        room = loaded.sizes.n_blocks * 32 // max(1, loaded.sizes.n_ctx)
        log.logger.info("milad %s serves %s (%s) at %s: %s tokens a request, for %d at once%s, %s", __version__, loaded.name,
                        loaded.runner.family.name, url, f"{loaded.sizes.n_ctx:,}", loaded.sizes.parallel,
                        "" if room >= loaded.sizes.parallel else f" (memory holds {room} full ones)",
                        f"script {self.value['script']}" if self.value["script"]
                        else f"{stat['n_threads']} threads, {stat['isa']}, ready after {time.monotonic() - self.started:.1f} s")
        if url.startswith("http:") and self.gate.ring is None:
            _show_curl(url)
        self.notify("READY=1", f"STATUS=serving {loaded.name} at {url}")

    def _url(self) -> str:
        if not self.server.ports:
            return self.value["host"]
        host = next((a for a in addresses(self.value) if not a.startswith("unix:")), "")
        shown = "127.0.0.1" if host in ("", "*", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        return f"http{'s' if self.ssl else ''}://{shown}:{self.server.ports[0]}"

    # Signals

    def _asked_to_end(self, number: int) -> None:
        if self.stop.is_set():
            log.logger.warning("asked again to end: ending now")
            self._tidy()
            os._exit(EXIT_FORCED)
        log.logger.info("%s: finishing what runs (at most %g s; once more ends at once)", signal.Signals(number).name,
                        self.value["drain_timeout"])
        self.stop.set()

    def _dump(self) -> None:
        lines = [f"{self._n_connections()} connections"]
        if self.loaded:
            lines += self.loaded.engine.dump().splitlines()
        for line in lines:
            log.logger.info("state: %s", line)

    def _reload(self) -> None:
        """SIGHUP: what the table marks as reloadable takes its new value; a mistake leaves everything as it was."""
        log.reopen()
        self.notify.reloading()
        try:
            options = self.reread() if self.reread else self.options
            new = values(options)
            if self.gate.ring is not None and not new["keys_file"]:
                for address in addresses(self.value):
                    check_exposed(address, {**self.value, "keys_file": None, "insecure_no_key": new["insecure_no_key"]})
            changed = [n for n in new if new[n] != self.value[n]]
            taken = {**self.value, **{n: new[n] for n in changed if BY_NAME[n].reload}}
            self._apply(taken)
        except UsageError as e:
            log.logger.error("the configuration stays as it is: %s", e)
        else:
            self.options = {n: options[n] if BY_NAME[n].reload else v for n, v in self.options.items()}
            self.value = taken
            log.set_level(taken["log_level"])
            if self.loaded:
                self.loaded.runner.defaults = loader.defaults(self.options)
                self.loaded.engine.queue_limit = taken["queue_limit"]
            if self.models:
                self.models.apply(self.options)
            for n in changed:
                if not BY_NAME[n].reload or n == "tls_cert" and bool(new[n]) != bool(self.ssl):
                    log.logger.warning("%s has changed: a restart takes it", n)
            log.logger.info("reloaded%s", ": " + ", ".join(n for n in changed if BY_NAME[n].reload) if changed else "")
        if self.loaded:
            self.notify("READY=1")

    async def _watchdog(self) -> None:
        """Keeps the service manager's watchdog content while the engines' threads move."""
        period_s = service.watchdog_s()
        while period_s > 0:
            if not self._fault():
                self.notify("WATCHDOG=1")
            await asyncio.sleep(period_s)

    def _fault(self) -> str:
        """What keeps a loaded model from answering: a step that takes longer than the service manager's patience, or STALL_S."""
        patience_s = 2 * service.watchdog_s() or STALL_S
        for served in (self.app.served, *(self.models.loaded() if self.models else ())):
            if served and (stalled_s := served.runner.engine.stalled_s()) >= patience_s:
                message = f"{served.id} has been in one step for {stalled_s:.0f} s"
                log.once(f"stall {served.id} {time.monotonic() // STALL_S}", "%s: it may hang", message)
                return message
        return ""

    async def _drain(self) -> None:
        self.notify("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int(self.value['drain_timeout'] * 1e6) + 15_000_000}")
        await self.server.drain(self.value["drain_timeout"])
        if self.models:
            await self.models.close()
        if self.loaded:
            await asyncio.to_thread(self.loaded.close)
        log.logger.info("ended")


def _show_curl(url: str) -> None:
    """A command to try: for a person at a terminal, or, where that person reads a file or a pipe, as one line of the log."""
    parts = (f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'",
             """-d '{"messages": [{"role": "user", "content": "Hello!"}]}'""")
    if sys.stderr.isatty():
        print("\n  " + " \\\n    ".join(parts) + "\n", file=sys.stderr)
    else:
        log.logger.info("try it: %s", " ".join(parts))


def _log_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Among them: accept() without descriptors left, which asyncio retries after a second."""
    error = context.get("exception")
    log.once(f"loop {context.get('message')} {type(error).__name__}", "%s: %s", context.get("message"), error)


def _store() -> Any:
    """Stored responses, in the state folder."""
    try:
        from .store import Store
    except ImportError:
        return None
    return Store(catalogue.data_folder("STATE", ".local/state"))
