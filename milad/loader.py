"""From options to a model that answers: file, context, engine, family, Runner. Used by the daemon and by `milad ask`."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping

from . import catalogue, families, log, machine, sizing
from .engine.loop import Engine
from .errors import UsageError
from .options import Value
from .turn import Defaults, Runner


@dataclass
class Loaded:
    """What serves one model. close() ends the engine and frees the memory."""
    name: str
    path: str
    model: Any
    context: Any
    engine: Any
    runner: Runner
    sizes: sizing.Sizes
    kv_bytes: int

    def close(self) -> None:
        if not self.engine.stop():
            log.logger.error("%s hangs in a step: its memory stays as it is", self.name)
            return
        if self.runner.grammar is not None:
            self.runner.grammar.close()         # it may still be reading the vocabulary
        self.context.close()
        self.model.close()


def models_folder(value: Mapping[str, Any]) -> Path:
    return Path(value["models_dir"]) if value["models_dir"] else catalogue.models_folder()


def defaults(options: Mapping[str, Value]) -> Defaults:
    """The sampling and policy options as turn wants them."""
    value = {name: v.value for name, v in options.items()}
    return Defaults(temperature=value["temperature"], top_k=value["top_k"], top_p=value["top_p"], min_p=value["min_p"],
                    repeat_penalty=value["repeat_penalty"], max_tokens=value["max_tokens"], tools=value["tools"],
                    template_date="today" if value["template_date"] == "today" else "",
                    completions_specials=value["completions_specials"], deadline_s=value["queue_timeout"])


def load(options: Mapping[str, Value], *, post: Callable[..., Any],
         progress: Callable[[float], None] = lambda share: None) -> Loaded:
    """Opens the model that the options name and starts its engine. post: how items reach the caller's event loop
    (Mailbox.post). progress gets 0..1, from the loading thread. UsageError (ModelError) says what is wrong, in one line."""
    value = {name: v.value for name, v in options.items()}
    value["kv_type"] = kv_type(value["kv_type"])
    wanted = value["model"][0] if value["model"] else None
    name, path = catalogue.resolve(wanted, folder=models_folder(value))
    name = value["model_name"] or name
    scripted = value["script"] is not None
    model = _open(os.fspath(path), value, scripted, progress)
    context = engine = None
    try:
        template = model.metadata("tokenizer.chat_template")
        family = families.choose(template if isinstance(template, str) else None, frozenset(model.specials),
                                 value["family"] or "")
        context, sizes = _context(model, value, scripted)
        for note in sizes.notes:
            log.logger.warning("%s", note)
        engine = Engine(model, context, post=post, n_ctx=sizes.n_ctx, parallel=sizes.parallel,
                        queue_limit=value["queue_limit"], step_ms=value["step_ms"], **_engine_extras(value, scripted))
        runner = Runner(model, context, engine, family, n_ctx=sizes.n_ctx, name=name, defaults=defaults(options),
                        grammar=_grammar(model), remember=getattr(engine, "remember", None))
        if runner.grammar is not None and family.tools_by_default(runner.known_as(), model.info.n_params):
            # the first request with tools need not wait for it, nor others' streams: the library keeps the GIL meanwhile
            threading.Thread(target=runner.grammar.warm, name="milad-grammar", daemon=True).start()
        kv_bytes = 0 if scripted else sizes.n_blocks * context.block_bytes
        _core_log()
        return Loaded(name, os.fspath(path), model, context, engine, runner, sizes, kv_bytes)
    except BaseException:
        _core_log()
        for part in (engine and engine.stop, context and context.close, model.close):
            if part:
                part()
        raise


def kv_type(wanted: str) -> str:
    """auto: Q8_0 where the processor multiplies bytes in vectors of 512 bits (half of the memory, prompts and deep contexts in two
    thirds of BF16's time, log-probabilities less far from F32's than the weights' rounding puts them: native/lab), else F16."""
    from . import capi
    if wanted != "auto":
        return wanted
    return "q8_0" if capi.devices()["isa"].startswith("avx512") else "f16"


def _core_log() -> None:
    """What the core had to say while opening, into the daemon's log."""
    from . import capi
    levels = {"D": "debug", "I": "info", "W": "warning", "E": "error"}
    for level, text in capi.drain_log():
        log.logger.log(log.LEVELS[levels.get(level, "info")], "%s", text)


def _open(path: str, value: Mapping[str, Any], scripted: bool, progress: Callable[[float], None]) -> Any:
    from . import capi
    if scripted:
        from . import scripted as core
        return core.open_model(value["script"], lambda: capi.Model(path, vocab_only=True))
    return capi.Model(path, n_threads=value["threads"] or 0, mlock=value["mlock"], repack=value["repack"], progress=progress)


def _context(model: Any, value: Mapping[str, Any], scripted: bool) -> tuple[Any, sizing.Sizes]:
    info = model.info
    bytes_per_token = 0
    if not scripted:
        if not info.has_weights:
            raise UsageError(f"{model.path} holds a vocabulary only: it can be served with --script, not run")
        bytes_per_token = sizing.kv_token_bytes(info.n_layer * info.n_head_kv, info.head_dim, value["kv_type"])
    sizes = sizing.choose(ctx=value["ctx"], parallel=value["parallel"], kv_memory=value["kv_memory"],
                          n_ctx_train=info.n_ctx_train, bytes_per_token=bytes_per_token,
                          available=machine.available_memory())
    context = model.context(n_blocks=sizes.n_blocks, n_threads=value["threads"] or 0, kv_type=value["kv_type"])
    return context, sizes


def _engine_extras(value: Mapping[str, Any], scripted: bool) -> dict[str, Any]:
    extras: dict[str, Any] = {"speculate": value["speculate"] and not scripted}
    if not scripted and value["kv_cache_disk"]:
        folder = value["kv_cache_dir"] or catalogue.data_folder("CACHE", ".cache") / "kv"
        extras.update(disk_dir=os.fspath(folder), disk_bytes=value["kv_cache_disk"], kv_type=value["kv_type"])
    return extras


def _grammar(model: Any) -> Any:
    """The constrainer where its library is there (milad[grammar]); None otherwise."""
    try:
        from . import grammar
        return grammar.Grammar(model)
    except ImportError:
        return None
