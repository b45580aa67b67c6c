"""One choice's way out: engine items become text, the family's blocks, stop strings, logprobs and usage. No asyncio."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import log
from .conversation import Message, Text, Thinking, ToolCall
from .engine.base import Admitted, Done, Fault, Item, Prefill, Scored, Token
from .engine.remember import fingerprint
from .errors import MiladError
from .events import BlockEnd, BlockStart, Delta, Event, Failure, Finish, Fold, Progress, Started, TokenLogprob, Usage
from .textstream import StopFilter, Utf8Joiner

if TYPE_CHECKING:
    from .turn import Prepared, Runner


class Output:
    """take(items) -> events. `finished`: the last event was a Finish or Failure; `cut`: the engine must be told to stop."""

    def __init__(self, runner: "Runner", prepared: "Prepared", choice: int) -> None:
        turn = prepared.turn
        self._prepared = prepared
        self._turn = turn
        self._model = runner.model
        self._special_ids = runner.special_ids          # user-defined ones too: Qwen's <tool_call>, <think>
        self._raw = turn.prompt is not None             # legacy completions: no markup is read
        self._parser = None if self._raw else runner.family.parser(turn, runner.specials)
        self._joiner = Utf8Joiner()
        self._turn_stop = StopFilter(() if self._raw else prepared.stop_texts)
        self._stop = StopFilter(turn.stop)
        self._logprobs = turn.top_logprobs is not None
        self._pending: list[TokenLogprob] = []
        self._kind = ""                                 # of the open block
        self._index = -1
        self._n_output = 0
        self._n_reasoning = 0
        self._calls = 0
        # clients write a call's JSON anew when they send it back: its turn is then known by what it says (engine.remember)
        self._remember = runner.remember if turn.tools and not turn.prefill and turn.n == 1 else None
        self._fold = Fold()
        self._usage = Usage(input_tokens=len(prepared.tokens))
        self._open_raw = False
        self._echo_due = False                          # once the prompt's scores are all here
        self.finished = False
        self.cut = False

    def take(self, items: list[Item]) -> list[Event]:
        out: list[Event] = []
        self._take(items, out)
        if self._remember is not None:
            for event in out:
                self._fold.take(event)
            if self.finished and self._calls and not self.cut:
                self._tag()
        return out

    def _tag(self) -> None:
        """Tells the memory what this generation means."""
        parts = {"text": lambda b: Text(b.text), "thinking": lambda b: Thinking(b.text),
                 "tool_call": lambda b: ToolCall(b.id, b.name, b.text)}
        message = Message("assistant", tuple(parts[b.kind](b) for b in self._fold.blocks))
        index = sum(m.role == "assistant" for m in self._turn.messages)
        self._remember.tag(self._prepared.tokens, index, fingerprint(message))

    def _take(self, items: list[Item], out: list[Event]) -> None:
        for item in items:
            if self.finished:
                break
            if self._echo_due and isinstance(item, (Token, Done)):
                self._echo_due = False
                self._echo_text(out)
            if isinstance(item, Token):
                self._token(item, out)
            elif isinstance(item, Done):
                self._done(item, out)
            elif isinstance(item, Prefill):
                out.append(Progress(item.done, item.total, item.cached, item.queued))
            elif isinstance(item, Admitted):
                self._usage = Usage(item.n_prompt, item.n_cached)
                out.append(Started(self._usage))
                self._echo_due = self._turn.echo
            elif isinstance(item, Scored):
                self._pending.append(self._logprob(item.id, item.logprob, item.top))
            elif isinstance(item, Fault):
                out.append(Failure(_as_error(item.error)))
                self.finished = True

    # -- tokens -------------------------------------------------------------------------------------------------------

    def _token(self, token: Token, out: list[Event]) -> None:
        self._n_output += 1
        if self._prepared.echo_only:
            self._finish("length", out)
            self.cut = True
            return
        if self._kind == "thinking":
            self._n_reasoning += 1
        if self._logprobs:
            self._pending.append(self._logprob(token.id, token.logprob, token.top, token.data))
        if not self._raw and token.id >= 0 and (token.id in self._special_ids or self._model.is_control(token.id)):
            held = self._joiner.flush()
            if held:
                self._text(held, False, out)
            if not self.finished:
                self._text(token.data.decode("utf-8", "replace"), True, out)
        else:
            text = self._joiner.feed(token.data)
            if text:
                self._text(text, False, out)

    def _text(self, text: str, special: bool, out: list[Event]) -> None:
        if self._parser is None:
            self._raw_text(text, out)
            return
        if special:
            held = self._turn_stop.flush()
            events = (self._parser.feed(held) if held else []) + self._parser.feed(text, True)
        else:
            events = self._parser.feed(self._turn_stop.feed(text))
        self._events(events, out)
        if self._turn_stop.matched is not None and not self.finished:
            self._end("stop", out)
            self.cut = True

    def _raw_text(self, text: str, out: list[Event]) -> None:
        if not self._open_raw:
            self._open_raw = True
            self._events([BlockStart(0, "text")], out)
        self._events([Delta(0, text)], out)

    def _events(self, events: list[Event], out: list[Event]) -> None:
        """The parser's events on their way out: stop strings in text, logprobs to the text they belong to, one call at most
        where the client asked for it."""
        for event in events:
            if isinstance(event, Delta):
                self._delta(event, out)
            elif isinstance(event, BlockStart):
                if event.kind == "tool_call":
                    if self._calls and not self._turn.parallel_tool_calls:
                        self._finish("tool_calls", out)
                        self.cut = True
                        return
                    event = replace(event, id=event.id or new_token())
                self._kind, self._index = event.kind, event.index
                out.append(event)
            elif isinstance(event, BlockEnd):
                if self._kind == "text":
                    self._release(self._stop.flush(), out)
                    self._drop_pending(out)
                if self._kind == "tool_call" and event.complete:
                    self._calls += 1
                self._kind = ""
                out.append(event)
            if self.finished:
                return
        if self._kind != "text":
            self._pending.clear()

    def _delta(self, event: Delta, out: list[Event]) -> None:
        if self._kind != "text":
            out.append(event)
            return
        self._release(self._stop.feed(event.text), out)
        if self._stop.matched is not None:
            self._drop_pending(out)
            out.append(BlockEnd(self._index))
            self._kind = ""
            self._finish("stop_sequence", out, self._stop.matched)
            self.cut = True

    def _release(self, text: str, out: list[Event]) -> None:
        if text:
            out.append(Delta(self._index, text, self._take_pending()))

    def _take_pending(self) -> tuple[TokenLogprob, ...]:
        if not self._pending:
            return ()
        taken = tuple(self._pending)
        self._pending.clear()
        return taken

    def _drop_pending(self, out: list[Event]) -> None:
        """Logprobs whose text never came (a stop string, half a character) still belong to the block."""
        if self._pending:
            out.append(Delta(self._index, "", self._take_pending()))

    # -- the end ------------------------------------------------------------------------------------------------------

    def _done(self, done: Done, out: list[Event]) -> None:
        self._n_output = done.n_output
        if done.reason == "cancelled":
            out.append(Failure(MiladError("internal", "the generation was cancelled")))
            self.finished = True
            return
        held = self._joiner.flush()
        if held:
            self._text(held, False, out)
        if self.finished:
            return
        reason = done.reason
        if reason == "length":
            reason = self._prepared.length_reason
        self._end(reason, out)

    def _end(self, reason: str, out: list[Event]) -> None:
        """Flushes what is held, closes the open block, finishes."""
        complete = reason == "stop"
        held = self._turn_stop.flush()
        if self._parser is not None:
            self._events((self._parser.feed(held) if held else []) + self._parser.finish(complete), out)
        elif self._open_raw:
            self._events([BlockEnd(0, complete)], out)
        if self.finished:
            return
        self._finish("tool_calls" if reason == "stop" and self._calls else reason, out)

    def _finish(self, reason: str, out: list[Event], stop_sequence: str | None = None) -> None:
        if self._kind:
            if self._kind == "text":
                self._drop_pending(out)
            out.append(BlockEnd(self._index))
            self._kind = ""
        usage = replace(self._usage, output_tokens=self._n_output, reasoning_tokens=self._n_reasoning)
        if self._prepared.echo_only:
            usage = replace(usage, output_tokens=0)
        out.append(Finish(reason, usage, stop_sequence))
        self.finished = True

    # -- echo and logprobs --------------------------------------------------------------------------------------------

    def _echo_text(self, out: list[Event]) -> None:
        """completions `echo`: the prompt as text, before anything generated; its logprobs arrived as Scored items, the first
        token has none."""
        tokens = self._prepared.tokens
        text = b"".join(map(self._model.token_bytes, tokens)).decode("utf-8", "replace")
        if self._logprobs:
            self._pending.insert(0, TokenLogprob(self._model.token_bytes(tokens[0]), float("nan"), (), tokens[0]))
        self._open_raw = True
        self._kind, self._index = "text", 0
        out.append(BlockStart(0, "text"))
        out.append(Delta(0, text, self._take_pending()))

    def _logprob(self, token: int, logprob: float, top: tuple[tuple[int, float], ...],
                 data: bytes | None = None) -> TokenLogprob:
        data = self._model.token_bytes(token) if data is None else data
        return TokenLogprob(data, logprob, tuple((self._model.token_bytes(t), p) for t, p in top), token)


def new_token() -> str:
    """24 hex digits: the unique part of a tool call's id; protocols put their prefix before it."""
    return os.urandom(12).hex()


def _as_error(error: Any) -> MiladError:
    if isinstance(error, MiladError):
        return error
    log.logger.error("engine fault: %s", error)
    return MiladError("internal", "the model failed in this generation; the daemon goes on. Its log says more")
