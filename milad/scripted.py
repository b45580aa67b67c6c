"""The scripted core: a real tokenizer whose generations play lines of a file instead of computing; behind capi's interface.

The file is JSON Lines, UTF-8, blank lines skipped:

    {"output": "raw model text with the family's markup", "when": {"tools": true, "path": "/v1/messages", "last": "regex"},
     "split": "token" | "byte", "delay_ms": 0, "token_delay_ms": 0, "fail_after": null, "hang_after": null}

Rules
- A generation plays the next unplayed line whose `when` matches; once all that match are played the last of them repeats. None
  matches: MiladError internal, naming the script. An empty `when` matches all.
- A step yields one token of the text (special tokens parsed) or, split "byte", one byte of its ordinary text, special tokens
  still whole. After the last the turn ends as if the model had said so. Every step counts as one generated token.
- delay_ms passes before the first token, token_delay_ms before each other. Meanwhile outputs are WAIT with the time they are
  due: step() itself never sleeps. fail_after: after that many tokens the sequence's engine "fails". hang_after: after that
  many step() never returns, and everybody waits: to see what watches over the daemon.
- Grammar masks reach the samplers, but nothing is held to them.

begin() may be called from any thread, step() from the engine's. Must not know families, protocols or the engine.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from dataclasses import dataclass
from typing import Any, Callable

from .engine.base import WAIT, Batch, Model, Output
from .errors import MiladError, UsageError

_KEYS = {"output", "when", "split", "delay_ms", "token_delay_ms", "fail_after", "hang_after"}
_WHEN = {"tools", "path", "last"}
MAX_DELAY_MS = 3_600_000


@dataclass
class Line:
    number: int
    output: str
    tools: bool | None = None
    path: str | None = None
    last: "re.Pattern[str] | None" = None
    split: str = "token"
    delay_s: float = 0.0
    token_delay_s: float = 0.0
    fail_after: int | None = None
    hang_after: int | None = None
    played: bool = False

    def matches(self, tools: bool, path: str, last: str) -> bool:
        return ((self.tools is None or self.tools == tools) and (self.path is None or self.path == path)
                and (self.last is None or self.last.search(last) is not None))


def read_script(path: str) -> list[Line]:
    """The lines of a script file; UsageError names the line that is wrong."""
    try:
        with open(path, encoding="utf-8") as f:
            texts = f.read().split("\n")
    except OSError as e:
        raise UsageError(f"can't read the script {path}: {e.strerror or e}") from e
    except UnicodeDecodeError as e:
        raise UsageError(f"the script {path} is not UTF-8: {e.reason} at byte {e.start}") from e
    lines = []
    for number, text in enumerate(texts, 1):
        if text.strip():
            try:
                lines.append(_line(number, json.loads(text)))
            except (ValueError, RecursionError) as e:
                raise UsageError(f"{path}, line {number}: {e}") from e
    if not lines:
        raise UsageError(f"the script {path} has no lines")
    return lines


def _line(number: int, value: Any) -> Line:
    if not isinstance(value, dict):
        raise ValueError("a line is a JSON object")
    _unknown(value, _KEYS, "")
    if not isinstance(value.get("output"), str):
        raise ValueError("output is the text to play, a string")
    when = {} if value.get("when") is None else value["when"]
    if not isinstance(when, dict):
        raise ValueError("when is an object")
    _unknown(when, _WHEN, "when.")
    for name, kind, what in (("tools", bool, "true or false"), ("path", str, "a string"), ("last", str, "a string")):
        if when.get(name) is not None and not isinstance(when[name], kind):
            raise ValueError(f"when.{name} is {what}")
    split = value.get("split", "token")
    if split not in ("token", "byte"):
        raise ValueError('split is "token" or "byte"')
    last = None
    if when.get("last") is not None:
        try:
            last = re.compile(when["last"])
        except (re.error, OverflowError) as e:
            raise ValueError(f"when.last is no regular expression: {e}") from e
    fail_after, hang_after = (None if value.get(name) is None else int(_number(value, name, whole=True))
                              for name in ("fail_after", "hang_after"))
    path = when.get("path")
    return Line(number, value["output"], when.get("tools"), None if path is None else _path(path), last, split,
                _number(value, "delay_ms") / 1000, _number(value, "token_delay_ms") / 1000, fail_after, hang_after)


def _unknown(value: dict[str, Any], known: set[str], where: str) -> None:
    for key in value:
        if key not in known:
            raise ValueError(f"unknown key {where}{key}; known are {', '.join(sorted(known))}")


def _number(value: dict[str, Any], name: str, whole: bool = False) -> float:
    n = value.get(name) or 0
    if isinstance(n, bool) or not isinstance(n, (int, float)) or not 0 <= n <= MAX_DELAY_MS or whole and n != int(n):
        raise ValueError(f"{name} is a {'whole ' * whole}number of 0 .. {MAX_DELAY_MS}")
    return n


def _path(path: str) -> str:
    """Without query, with /v1."""
    path = path.partition("?")[0]
    return path if path.startswith("/v1/") else "/v1" + ("" if path.startswith("/") else "/") + path


class Play:
    """One generation's line on its way: steps are (token, its bytes)."""

    def __init__(self, line: Line, steps: list[tuple[int, bytes]]) -> None:
        self.line = line
        self.steps = steps
        self.n_played = 0
        self.due: float | None = None


def open_model(script: str, open_vocabulary: Callable[[], Model], *,
               clock: Callable[[], float] = time.monotonic) -> "ScriptedModel":
    """The script's answers over a model file's vocabulary, which is opened when the script is known to be good. UsageError
    names the script's line."""
    lines = read_script(script)
    return ScriptedModel(open_vocabulary(), script, lines, clock=clock)


class ScriptedModel:
    """base.Model: the wrapped model's tokenizer and metadata, contexts that play the script."""

    def __init__(self, model: Model, script: str, lines: list[Line], *,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self.script = script
        self._lines = lines
        self._clock = clock
        self._lock = threading.Lock()
        self._byte_ids: list[int] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def context(self, *, n_blocks: int, n_threads: int = 0, max_rows: int = 512, kv_type: str = "f16") -> "ScriptedContext":
        return ScriptedContext(self, n_blocks, max_rows, self._clock)

    def close(self) -> None:
        self._model.close()

    def begin(self, *, tools: bool, path: str, last: str) -> Play:
        """Takes the line that a generation plays; MiladError internal where none matches."""
        where = _path(path)
        with self._lock:
            found = [line for line in self._lines if line.matches(tools, where, last)]
            if not found:
                raise MiladError("internal", f"no line of the script {os.path.basename(self.script)} matches this request "
                                             f"(tools {str(tools).lower()}, path {where})", code="script")
            line = next((line for line in found if not line.played), found[-1])
            line.played = True
        return Play(line, self._steps(line))

    def _steps(self, line: Line) -> list[tuple[int, bytes]]:
        tokens = [(t, self._model.token_bytes(t)) for t in self._model.tokenize(line.output, parse_special=True)]
        if line.split == "token":
            return tokens
        whole = set(self._model.specials.values())
        steps: list[tuple[int, bytes]] = []
        for token, data in tokens:
            if token in whole or self._model.is_control(token):
                steps.append((token, data))
            else:
                ids = self._bytes_to_ids()
                steps += [(ids[b] if ids[b] >= 0 else token, bytes((b,))) for b in data]
        return steps

    def _bytes_to_ids(self) -> list[int]:
        """The token that stands for each single byte; -1: the vocabulary has none."""
        with self._lock:
            if self._byte_ids is None:
                ids = [-1] * 256
                for token in range(self._model.info.n_vocab):
                    data = self._model.token_bytes(token)
                    if len(data) == 1 and ids[data[0]] < 0 and not self._model.is_control(token):
                        ids[data[0]] = token
                self._byte_ids = ids
            return self._byte_ids


class ScriptedContext:
    """base.Context without weights: prompts take no time, outputs come from the samplers' plays."""

    block_bytes = 0
    layout = "scripted"

    def __init__(self, model: ScriptedModel, n_blocks: int, max_rows: int, clock: Callable[[], float]) -> None:
        self.n_blocks = n_blocks
        self.max_rows = max_rows
        self._model = model
        self._clock = clock
        self._n_steps = self._n_rows = 0
        info = model.info
        self._end = next((t for t in (info.eot, info.eos, *sorted(model.eog)) if t >= 0), 0)

    def step(self, batch: Batch) -> list[Output]:
        self._n_steps += 1
        self._n_rows += len(batch.rows) // 4
        now = self._clock()
        return [self._output(s, now) for s in batch.samplers]

    def _output(self, sampler: Any, now: float) -> Output:
        if sampler.forced >= 0:
            return Output(sampler.forced)
        play: Play | None = sampler.play
        if play is None:
            return Output(-1, fault=f"a generation without a line of the script {self._model.script}")
        line, n = play.line, play.n_played
        if play.due is None:
            play.due = now + line.delay_s
        if now < play.due:
            return Output(WAIT, due=play.due)
        if line.fail_after is not None and n >= line.fail_after:
            return Output(-1, fault=f"the script's line {line.number} fails after {line.fail_after} tokens")
        if line.hang_after is not None and n >= line.hang_after:
            threading.Event().wait()
        play.n_played = n + 1
        play.due = now + line.token_delay_s
        if n >= len(play.steps):
            return Output(self._end, data=b"", end=True)
        token, data = play.steps[n]
        return Output(token, 0.0, ((token, 0.0),) if sampler.n_top > 0 else (), data)

    def kv_copy(self, src: int, dst: int, n_tokens: int) -> None:
        pass

    def kv_read(self, block: int) -> bytes:
        return b""

    def kv_write(self, block: int, data: bytes) -> None:
        pass

    def interrupt(self) -> None:
        pass

    def stat(self) -> dict[str, Any]:
        return {"n_threads": 0, "n_blocks": self.n_blocks, "max_rows": self.max_rows, "kv_bytes": 0, "kv_block_bytes": 0,
                "scratch_bytes": 0, "n_steps": self._n_steps, "n_rows": self._n_rows, "isa": "scripted"}

    def begin(self, *, tools: bool, path: str, last: str) -> Play:
        return self._model.begin(tools=tools, path=path, last=last)

    def close(self) -> None:
        pass
