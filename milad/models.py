"""Several models in one daemon: the first stays, the others come when they are asked for and go when they are idle.

One load at a time; requests for a model wait for its one load. A model is never closed while a request holds it. Event loop's
thread; loading and closing happen in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

from . import catalogue, loader, log, machine
from .app import Served
from .errors import MiladError, UsageError
from .options import Value

MARGIN = 1.15           # of a file's size: what a model needs at least once it runs


@dataclass
class _Entry:
    id: str
    path: Path
    options: Mapping[str, Value]
    loaded: loader.Loaded | None = None
    served: Served | None = None
    task: "asyncio.Task[Served] | None" = None
    n_users: int = 0
    used_s: float = 0.0

    @property
    def n_bytes(self) -> int:
        if self.loaded is None:
            return int(self.path.stat().st_size * MARGIN)
        return size_of(self.loaded)


def size_of(loaded: loader.Loaded) -> int:
    """Bytes that a loaded model counts with in the budget."""
    return max(loaded.model.info.weight_bytes, Path(loaded.path).stat().st_size) + loaded.kv_bytes


def resolve(options: Mapping[str, Value], folder: Path) -> list[tuple[str, Path]]:
    """The models that the option names, the first first. UsageError for one that is not here or named twice."""
    wanted = options["model"].value or (None,)
    found = [catalogue.resolve(name, folder=folder) for name in wanted]
    if options["model_name"].value:
        found[0] = (options["model_name"].value, found[0][1])
    names = [name for name, _ in found] + list(options["model_aliases"].value)
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two models are named {name}: give one another file name, or model_name to the first")
    return found


class Models:
    """app.base.Pool: the models besides the first."""

    def __init__(self, others: list[tuple[str, Path]], options: Mapping[str, Value], *, post: Callable[..., Any],
                 watch: Callable[[Any], Any], first: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        """post: the event loop's Mailbox; watch: a runner as the metrics want it; first: bytes of the first model."""
        own = {"model_name": Value(None, "default"), "model_aliases": Value((), "default")}
        self._entries = {name: _Entry(name, path, {**options, **own, "model": Value((str(path),), "default")}) for name, path in others}
        self._post = post
        self._watch = watch
        self._first = first
        self._clock = clock
        self._lock = asyncio.Lock()
        self.idle_s = options["idle_unload"].value
        self.budget = options["models_memory"].value

    # For the application

    def ids(self) -> list[str]:
        return list(self._entries)

    def find(self, name: str) -> str | None:
        return name if name in self._entries else None

    def loaded(self) -> list[Served]:
        return [e.served for e in self._entries.values() if e.served]

    @contextlib.contextmanager
    def hold(self, id: str) -> Iterator["asyncio.Future[Served]"]:
        """The model, once it is loaded; it stays until the end of the block."""
        entry = self._entries[id]
        entry.n_users += 1
        try:
            if entry.task is None or entry.task.done() and (entry.task.cancelled() or entry.task.exception() is not None):
                entry.task = asyncio.get_running_loop().create_task(self._load(entry))
                entry.task.add_done_callback(lambda t: t.cancelled() or t.exception())    # seen: nobody may wait any more
            yield entry.task
        finally:
            entry.n_users -= 1
            entry.used_s = self._clock()

    # Loading and unloading

    async def _load(self, entry: _Entry) -> Served:
        async with self._lock:
            await self._make_room(entry)
            log.logger.info("loading %s", entry.id)
            try:
                loaded = await asyncio.to_thread(loader.load, entry.options, post=self._post)
            except UsageError as e:
                log.logger.error("%s: %s", entry.id, e)
                raise MiladError("unavailable", f"the model {entry.id} could not be loaded; the log says why") from None
            entry.loaded = loaded
            entry.served = Served(entry.id, self._watch(loaded.runner), loaded.path, n_slots=loaded.sizes.parallel, created=int(time.time()))
            entry.used_s = self._clock()
            log.logger.info("%s is ready (%s, %s tokens a request)", entry.id, loaded.runner.family.name, f"{loaded.sizes.n_ctx:,}")
            return entry.served

    async def _make_room(self, entry: _Entry) -> None:
        """Closes idle models, the longest idle one first, until this one fits the budget, or the memory that is free."""
        while True:
            taken = self._first() + sum(e.n_bytes for e in self._entries.values() if e.loaded)
            if self.budget is not None:
                fits = taken + entry.n_bytes <= self.budget
            else:
                fits = entry.n_bytes <= machine.available_memory()
            if fits:
                return
            idle = [e for e in self._entries.values() if e.loaded and not e.n_users]
            if not idle:
                raise MiladError("overloaded", f"there is no memory for the model {entry.id} beside those at work", retry_after_s=10)
            await self._unload(min(idle, key=lambda e: e.used_s))

    async def _unload(self, entry: _Entry) -> None:
        loaded, entry.loaded, entry.served, entry.task = entry.loaded, None, None, None
        assert loaded is not None
        log.logger.info("unloading %s", entry.id)
        await asyncio.to_thread(loaded.close)

    async def watch_idle(self) -> None:
        """Closes what nobody has used for idle_unload seconds. Runs until cancelled."""
        while True:
            await asyncio.sleep(min(10.0, max(0.05, self.idle_s / 4)) if self.idle_s else 10.0)
            async with self._lock:
                for entry in self._entries.values():
                    if self.idle_s and entry.loaded and not entry.n_users and self._clock() - entry.used_s >= self.idle_s:
                        await self._unload(entry)

    def apply(self, options: Mapping[str, Value]) -> None:
        """Reloaded options, for the models that are loaded and those to come."""
        self.idle_s = options["idle_unload"].value
        for entry in self._entries.values():
            own = {n: entry.options[n] for n in ("model", "model_name", "model_aliases")}
            entry.options = {**options, **own}
            if entry.loaded:
                entry.loaded.runner.defaults = loader.defaults(entry.options)
                entry.loaded.engine.queue_limit = options["queue_limit"].value

    async def close(self) -> None:
        async with self._lock:
            for entry in self._entries.values():
                if entry.loaded:
                    await self._unload(entry)
