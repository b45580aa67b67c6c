"""From a Turn to a stream of events: the only joiner of model families and the engine.

prepare() does everything that can fail because of what the client sent (tool policy, rendering, tokenising, limits); run()
submits and hands events to a reader. What a generation's tokens become on the way out lives in output.py.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from array import array
from dataclasses import dataclass, replace
from typing import Any, Awaitable, Callable, Iterable, Protocol as TypingProtocol, Sequence

from . import log
from .conversation import ToolSpec, Turn
from .engine.remember import fingerprint
from .engine.base import Constraint, Item, Model, Request, SamplerArgs
from .errors import ContextOverflow, MiladError, invalid
from .events import Event
from .families.base import Family, Segment, Special
from .output import Output

Wait = Callable[[], Awaitable[None]]
Reader = Callable[[list[tuple[int, Event]]], "Wait | None"]

PAUSE_AT = 512          # undelivered items at which a slow reader's sequence is paused
_MARKUP = re.compile(r"<[^\s<>]+>|\[[A-Z/_]+\]")   # the look of a user-defined token that means something to a family

# (prefix, suffix, middle): Qwen2.5-Coder, StarCoder and Granite, its other spelling, DeepSeek, CodeLlama (llama.cpp's llama-vocab.cpp)
FIM = (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
       ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
       ("▁<PRE>", "▁<SUF>", "▁<MID>"), ("<PRE>", "<SUF>", "<MID>"))


class Grammar(TypingProtocol):
    """grammar.Grammar: turns what a Turn asks of the output's form into constraints."""

    def compile(self, turn: Turn, family: Family) -> Constraint | None:
        """None: nothing to hold. Raises MiladError for a contract that can't be kept."""
        ...


@dataclass(frozen=True)
class Defaults:
    """What a client leaves out: the daemon's options; None falls to the model file's general.sampling.*, then WIRE's."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    max_tokens: int | None = None
    tools: str = "auto"                      # auto, on, off
    template_date: str = ""                  # "", or "today"
    completions_specials: bool = True        # raw prompts may spell control tokens
    deadline_s: float | None = None          # longest wait in the queue


@dataclass
class Prepared:
    """A Turn that passed: rendered, tokenised, within the limits."""
    turn: Turn                               # as the model sees it (tools after policy)
    tokens: list[int]
    max_tokens: int
    length_reason: str                       # length, or context where the room is less than the client's number
    samplers: list[SamplerArgs]
    constraints: list[Constraint | None]
    plays: list[Any]
    client: str = ""
    stop_texts: tuple[str, ...] = ()
    echo_only: bool = False                  # completions with max_tokens 0


class Runner:
    """One model's conversations. prepare, count and the text tools may run in any thread; run on the event loop."""

    def __init__(self, model: Model, context: Any, engine: Any, family: Family, *, n_ctx: int, name: str = "",
                 defaults: Defaults = Defaults(), grammar: Grammar | None = None,
                 remember: Any = None) -> None:
        self.model = model
        self.context = context
        self.engine = engine
        self.family = family
        self.n_ctx = n_ctx
        self.name = name
        self.defaults = defaults
        self.grammar = grammar
        self.remember = remember
        self.specials = frozenset(model.specials)
        self.special_ids = frozenset(model.specials.values())
        soft = [s for s, i in model.specials.items() if _MARKUP.fullmatch(s) and not model.is_control(i)]
        self._markup = re.compile("|".join(map(re.escape, soft))) if soft else None
        stops = family.stops(self.specials)
        self.stop_ids = frozenset(model.eog) | {model.specials[s] for s in stops if s in self.specials}
        self.stop_texts = tuple(s for s in stops if s not in self.specials)
        self._file_defaults = _file_sampling(model)

    # -- what a Turn becomes ------------------------------------------------------------------------------------------

    def prepare(self, turn: Turn, *, path: str = "", client: str = "") -> Prepared:
        """Raises MiladError (a true 4xx); nothing is submitted yet."""
        declared = turn.declared_tools or bool(turn.tools)
        last = turn.last_text
        turn = self._policy(turn)
        tokens = self.tokens(turn)
        param = "prompt" if turn.prompt is not None else "input" if turn.api == "responses" else "messages"
        if not tokens:
            raise invalid(param, "the prompt is empty: it has no tokens")
        if len(tokens) + 1 > self.n_ctx:
            raise ContextOverflow(len(tokens), self.n_ctx, param)
        self._check(turn)
        room = self.n_ctx - len(tokens)
        asked = turn.max_tokens if turn.max_tokens is not None else self.defaults.max_tokens
        max_tokens = room if asked is None else min(asked, room)
        reason = "context" if asked is None or asked > room else "length"
        constraints = self._constraints(turn)
        seed = turn.sampling.seed
        if seed is None:
            seed = int.from_bytes(os.urandom(8), "little")
        samplers = [self._sampler(turn, (seed + i) % 2**64, len(tokens)) for i in range(turn.n)]
        plays = [self.context.begin(tools=declared, path=path, last=last) for _ in range(turn.n)]
        return Prepared(turn, tokens, max(1, max_tokens), reason, samplers, constraints, plays, client,
                        self.stop_texts, echo_only=asked == 0)

    def count(self, turn: Turn) -> int:
        """The prompt tokens that the same request would report."""
        return len(self.tokens(self._policy(turn)))

    def tokens(self, turn: Turn) -> list[int]:
        if turn.prompt is not None:
            return self._infill(turn) if turn.suffix else self._raw(turn.prompt)
        tokens = self._tokenize(self.segments(turn))
        if self.remember is None:
            return tokens
        return self.remember.splice(tokens, [fingerprint(m) for m in turn.messages if m.role == "assistant"])

    def segments(self, turn: Turn) -> list[Segment]:
        if self.defaults.template_date == "today" and not turn.date:
            turn = replace(turn, date=time.strftime("%d %b %Y"))
        return self.family.render(turn, self.specials)

    def _raw(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.model.tokenize(prompt, add_bos=self.model.info.add_bos,
                                       parse_special=self.defaults.completions_specials)
        n_vocab = self.model.info.n_vocab
        for i, token in enumerate(prompt):
            if not 0 <= token < n_vocab:
                raise invalid(f"prompt[{i}]", f"token id {token} is outside the vocabulary of {n_vocab}")
        return list(prompt)

    def _infill(self, turn: Turn) -> list[int]:
        """Prefix, suffix, middle in the spelling of the model's fill-in-the-middle tokens."""
        marks = self._fim_marks()
        if marks is None:
            raise invalid("suffix", "suffix: this model has no fill-in-the-middle tokens", "unsupported_suffix")
        info, special = self.model.info, self.defaults.completions_specials
        prompt = turn.prompt
        before = self.model.tokenize(prompt, parse_special=special) if isinstance(prompt, str) else self._raw(prompt or ())
        after = self.model.tokenize(turn.suffix, parse_special=special)
        bos = [info.bos] if info.add_bos and info.bos >= 0 else []
        return [*bos, marks[0], *before, marks[1], *after, marks[2]]

    def _fim_marks(self) -> tuple[int, int, int] | None:
        """The tokens that the file names, else those of a known spelling."""
        named = [self.model.metadata(f"tokenizer.ggml.fim_{part}_token_id") for part in ("pre", "suf", "mid")]
        if all(isinstance(t, int) and 0 <= t < self.model.info.n_vocab for t in named):
            return named[0], named[1], named[2]
        specials = self.model.specials
        for pre, suf, mid in FIM:
            if pre in specials and suf in specials and mid in specials:
                return specials[pre], specials[suf], specials[mid]
        return None

    def _tokenize(self, segments: Iterable[Segment]) -> list[int]:
        """Control tokens come from Special segments only; neighbouring text is tokenised as one piece."""
        specials = self.model.specials
        info = self.model.info
        parts: list[tuple[bool, str]] = []
        for segment in segments:
            special = isinstance(segment, Special)
            if special and segment.text not in specials:
                log.once(f"special {segment.text}", "the vocabulary has no token %s: it is rendered as ordinary text",
                         segment.text)
                special = False
            if parts and not special and not parts[-1][0]:
                parts[-1] = (False, parts[-1][1] + segment.text)
            else:
                parts.append((special, segment.text))
        tokens: list[int] = []
        if info.add_bos and info.bos >= 0 and not (parts and parts[0][0] and specials[parts[0][1]] == info.bos):
            tokens.append(info.bos)
        for special, text in parts:
            if special:
                tokens.append(specials[text])
            elif text:
                tokens += self._words(text)
        return tokens

    def _words(self, text: str) -> list[int]:
        """Text's tokens. The core finds user-defined tokens in any text; those that are markup are cut in two before it looks."""
        if self._markup is None or not self._markup.search(text):
            return self.model.tokenize(text)
        tokens: list[int] = []
        start = 0
        for found in self._markup.finditer(text):
            tokens += self.model.tokenize(text[start:found.start() + 1])
            start = found.start() + 1
        return tokens + self.model.tokenize(text[start:])

    # -- policy -------------------------------------------------------------------------------------------------------

    def _policy(self, turn: Turn) -> Turn:
        """What of the declared tools the model is shown."""
        choice = turn.tool_choice
        forced = choice.mode in ("required", "named")
        if not turn.tools:
            if forced:
                raise invalid("tool_choice", "a tool call is demanded, but the request declares no tool that can be called here")
            return turn
        if choice.mode == "named" and all(t.name != choice.name for t in turn.tools):
            raise invalid("tool_choice", f"tool_choice names {choice.name!r}, which is not among the tools")
        policy = self.defaults.tools
        if policy == "off":
            if forced:
                raise invalid("tool_choice", "tools are switched off on this server (tools = off), so a call can't be forced")
            self._stripped(turn, "tools = off")
            return replace(turn, tools=())
        if choice.mode == "none":
            return replace(turn, tools=())
        if policy == "auto" and not self.family.tools_by_default(self.known_as(), self.model.info.n_params):
            if not forced:
                self._stripped(turn, "the model has no tool training; --tools on shows them all the same")
                return replace(turn, tools=())
            return replace(turn, tools=tuple(_compact(t) for t in turn.tools
                                             if choice.mode == "required" or t.name == choice.name))
        return turn

    def known_as(self) -> str:
        """What the model file calls itself; its size may stand in it."""
        parts = [self.model.metadata(k) for k in ("general.name", "general.basename", "general.size_label")]
        return " ".join(str(p) for p in parts if p) or os.path.basename(self.model.path)

    def _stripped(self, turn: Turn, why: str) -> None:
        names = ", ".join(t.name for t in turn.tools[:8]) + (", ..." if len(turn.tools) > 8 else "")
        log.once(f"tools {turn.api} {names}", "%d tools of a %s request were not shown to the model (%s): %s",
                 len(turn.tools), turn.api, names, why)

    def _check(self, turn: Turn) -> None:
        for token, _ in turn.sampling.logit_bias:
            if not 0 <= token < self.model.info.n_vocab:
                raise invalid("logit_bias", f"token id {token} is outside the vocabulary of {self.model.info.n_vocab}")
        for what in turn.ignored:
            log.once(f"ignored {turn.api} {what}", "%s: ignored %s", turn.api, what)

    def _constraints(self, turn: Turn) -> list[Constraint | None]:
        forced = turn.tool_choice.mode in ("required", "named") and bool(turn.tools)
        if self.grammar is None:
            if turn.format.kind != "text" or forced:
                raise invalid("tool_choice" if forced else "response_format",
                              "constrained output needs the optional library llguidance, which this milad was built "
                              "without: install milad[grammar]", code="grammar_unavailable")
            return [None] * turn.n
        first = self.grammar.compile(turn, self.family)
        return [first if i == 0 or first is None else first.copy() for i in range(turn.n)]

    def _sampler(self, turn: Turn, seed: int, n_prompt: int) -> SamplerArgs:
        def pick(name: str, fallback: Any) -> Any:
            for source in (getattr(turn.sampling, name), getattr(self.defaults, name), self._file_defaults.get(name)):
                if source is not None:
                    return source
            return fallback

        bias = turn.sampling.logit_bias
        return SamplerArgs(
            temperature=pick("temperature", 0.7), top_k=pick("top_k", 40), top_p=pick("top_p", 0.95),
            min_p=pick("min_p", 0.0), repeat_penalty=pick("repeat_penalty", 1.0),
            presence_penalty=turn.sampling.presence_penalty or 0.0,
            frequency_penalty=turn.sampling.frequency_penalty or 0.0,
            n_top=-1 if turn.top_logprobs is None else turn.top_logprobs, seed=seed,
            bias_ids=array("i", (t for t, _ in bias)) if bias else None,
            bias=array("f", (b for _, b in bias)) if bias else None, n_prompt=n_prompt)

    # -- generation ---------------------------------------------------------------------------------------------------

    def run(self, prepared: Prepared) -> "Run":
        """Submits now; may raise MiladError: the queue is full."""
        return Run(self, prepared)

    # -- for people who debug prompts ---------------------------------------------------------------------------------

    def tokenize(self, content: str, *, parse_special: bool = False, add_special: bool = False,
                 with_pieces: bool = False) -> list[Any]:
        tokens = self.model.tokenize(content, add_bos=add_special and self.model.info.add_bos, parse_special=parse_special)
        if not with_pieces:
            return tokens
        return [{"id": t, "piece": _piece(self.model.token_bytes(t))} for t in tokens]

    def detokenize(self, tokens: Sequence[int]) -> str:
        n_vocab = self.model.info.n_vocab
        for i, token in enumerate(tokens):
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < n_vocab:
                raise invalid(f"tokens[{i}]", f"not a token id below {n_vocab}")
        return b"".join(map(self.model.token_bytes, tokens)).decode("utf-8", "replace")

    def apply_template(self, turn: Turn) -> tuple[str, list[int]]:
        turn = self._policy(turn)
        return "".join(s.text for s in self.segments(turn)), self.tokens(turn)


class Run:
    """The choices of one request while they generate. Event loop only.

    The reader is called from the engine's delivery itself: a task in between would cost each token a second turn of the loop,
    half of Python's whole time.
    """

    def __init__(self, runner: Runner, prepared: Prepared) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader: Reader | None = None   # None: what comes is kept
        self._items: list[tuple[int, list[Item]]] = []
        self._n_waiting = 0
        self._paused = False
        self._wait: Wait | None = None
        self._error: Exception | None = None
        self._soon = False
        self._wake: asyncio.Future[None] | None = None
        self._outputs = [Output(runner, prepared, i) for i in range(prepared.turn.n)]
        self._left = prepared.turn.n
        self._handles: list[Any] = []
        deadline = runner.defaults.deadline_s
        try:
            for i in range(prepared.turn.n):
                self._handles.append(runner.engine.submit(Request(
                    tokens=prepared.tokens, max_tokens=prepared.max_tokens, sampler=prepared.samplers[i],
                    stop_ids=runner.stop_ids, sink=self._sink(i), constraint=prepared.constraints[i],
                    score_prompt=prepared.turn.echo and prepared.turn.top_logprobs is not None,
                    client=prepared.client, play=prepared.plays[i],
                    deadline=None if deadline is None else time.monotonic() + deadline)))
        except MiladError:
            self.cancel()
            raise

    async def read(self, reader: Reader) -> None:
        """Calls reader with (choice, event), one list per engine step, until the last or close(). Where it returns something to
        wait for, that is awaited before the next call, and a long wait pauses the sequences. What it raises is raised here."""
        try:
            while self._left:
                self._wake = self._loop.create_future()
                self._reader = reader
                if self._paused:
                    self._paused = False
                    for handle in self._handles:
                        handle.resume()
                self._deliver()
                await self._wake
                if self._error is not None:
                    raise self._error
                if self._wait is not None:
                    wait, self._wait = self._wait, None
                    await wait()
        finally:
            self._reader = None

    def _sink(self, choice: int) -> Callable[[list[Item]], None]:
        def sink(items: list[Item]) -> None:
            self._items.append((choice, items))
            if self._reader is None:
                self._n_waiting += len(items)
                if self._n_waiting > PAUSE_AT and not self._paused:
                    self._paused = True
                    for handle in self._handles:
                        handle.pause()
            elif len(self._outputs) == 1:
                self._deliver()
            elif not self._soon:             # the other choices' items of this step come in the same turn of the loop
                self._soon = True
                self._loop.call_soon(self._deliver)
        return sink

    def _deliver(self) -> None:
        """What came, to the reader."""
        self._soon = False
        if self._reader is None:
            return
        try:
            events = self._take()
            if events:
                self._wait = self._reader(events)
        except Exception as e:
            self._error = e
        if self._wait is not None or self._error is not None or self._left == 0:
            self._rest()

    def _take(self) -> list[tuple[int, Event]]:
        taken, self._items, self._n_waiting = self._items, [], 0
        events: list[tuple[int, Event]] = []
        for choice, items in taken:
            output = self._outputs[choice]
            if output.finished:
                continue
            for event in output.take(items):
                events.append((choice, event))
            if output.finished:
                self._left -= 1
                if output.cut:
                    self._handles[choice].cancel()
        return events

    def _rest(self) -> None:
        """No more to the reader until read() says so."""
        self._reader = None
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def cancel(self) -> None:
        """Stops what still runs, within a step."""
        for handle, output in zip(self._handles, self._outputs):
            if not output.finished:
                handle.cancel()

    def close(self) -> None:
        """cancel(), and read() returns. May be called by the reader."""
        self.cancel()
        self._left = 0
        self._rest()


def _piece(data: bytes) -> Any:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)


def _compact(tool: ToolSpec) -> ToolSpec:
    """A tool as small as it can be shown: for a call forced on a model that `auto` shows no tools."""
    return replace(tool, description=tool.description[:200])


def _file_sampling(model: Model) -> dict[str, Any]:
    """general.sampling.* keys of the file, where they are usable numbers."""
    found: dict[str, Any] = {}
    for name, key, kind in (("temperature", "temp", float), ("top_k", "top_k", int), ("top_p", "top_p", float),
                            ("min_p", "min_p", float), ("repeat_penalty", "penalty_repeat", float)):
        value = model.metadata(f"general.sampling.{key}")
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value and 0 <= value < 1e6:
            found[name] = kind(value)
    return found
