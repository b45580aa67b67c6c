"""Output held to a schema, regex, grammar or tool list: Turns become llguidance grammars, grammars become token masks.

The only user of llguidance (the optional extra milad[grammar]); importing this module without it raises ImportError. What
it owns: how a family's call markup is written as one Lark grammar, and what happens to a schema that the constrainer can't
follow (tools: relaxed with a log line; response_format: a 400).

Grammars are compiled in any thread. A Constraint belongs to the engine thread.
"""

from __future__ import annotations

import json
import re
import threading
from typing import Any, Iterable

import llguidance
from llguidance import LLMatcher, LLTokenizer

from . import log
from .conversation import Format, ToolSpec, Turn
from .engine.base import Model
from .errors import MiladError, invalid
from .families.base import CallMarkup, Family

# One spelling of JSON, so that a hot model can't wander off into white space for ever.
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LIMITS = dict(step_max_items=100_000, verbose_errors=False)
_MAX_SCHEMA = 200_000               # bytes of one schema: beyond it compiling takes seconds
_TEXT = r"(.|\n)*"


class Grammar:
    """Compiles what a Turn asks of the output's form, for one model's vocabulary."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._n_words = (model.info.n_vocab + 31) // 32

    def compile(self, turn: Turn, family: Family) -> "MaskConstraint | None":
        """None: nothing to hold the output to. MiladError (400) for a contract that can't be kept."""
        think = _thinking(turn, family)
        forced = turn.tool_choice.mode in ("required", "named") and bool(turn.tools)
        if forced:
            tools = [t for t in turn.tools if turn.tool_choice.mode == "required" or t.name == turn.tool_choice.name]
            text = self._calls(turn, family, tools, think, free_text=False)
            if text is None:
                raise invalid("tool_choice", f"calls of the {family.name} format can't be forced")
            return self._constraint(text, "tool_choice")
        if turn.format.kind != "text":
            return self._constraint(self._format(turn.format, think), _format_param(turn))
        if turn.tools and turn.tool_choice.mode == "auto":
            text = self._calls(turn, family, list(turn.tools), (), free_text=True)
            if text is not None:
                try:
                    return self._constraint(text, "tools")
                except MiladError as e:      # in auto mode a grammar is a help, not a contract
                    log.once(f"grammar {e.message[:80]}", "tool calls of this request are not constrained: %s", e.message)
        return None

    # -- grammars as text ---------------------------------------------------------------------------------------------

    def _format(self, form: Format, think: tuple[str, ...]) -> str:
        if form.kind in ("json_object", "json_schema"):
            schema = {"type": "object"} if form.kind == "json_object" else form.schema
            problem = self._schema_problem(schema)
            if problem:
                raise invalid("response_format", f"the JSON schema can't be followed: {problem}")
            return _lark(self._think(think) + ["%json " + _schema_text(schema, lenient=False)])
        if form.kind == "regex":
            body = "REGEX"
            # "dw": \d and \w are ASCII, as in JSON Schema and JavaScript
            rules = [f"REGEX: /{llguidance.regex_to_lark(form.text, use_ascii='dw')}/"]
            return _lark(self._think(think) + [body], rules)
        text = form.text
        if form.kind == "gbnf":
            from llguidance.gbnf_to_lark import any_to_lark
            try:
                text = any_to_lark(text)
            except Exception as e:           # its parser raises whatever it meets
                raise invalid("grammar", f"the grammar is not GBNF: {str(e)[:200]}") from None
        return text

    def _calls(self, turn: Turn, family: Family, tools: list[ToolSpec], think: tuple[str, ...], *,
               free_text: bool) -> str | None:
        markup = family.call_grammar(turn)
        if markup is None or (free_text and not markup.trigger):
            return None
        rules: list[str] = []
        names = []
        for i, tool in enumerate(tools):
            names.append(f"call_{i}")
            rules.append(f"call_{i}: " + " ".join(self._call(markup, tool, free_text)))
        any_call = "(" + " | ".join(names) + ")"
        more = turn.parallel_tool_calls
        if free_text:
            return self._free_text(markup, any_call, rules, more)
        separator = self._spell(markup.separator) if markup.separator else []
        parts = self._think(think)
        body = [any_call] + ([f"({' '.join(separator + [any_call])})*"] if more else [])
        if markup.array:
            parts += self._spell(markup.begin) + ['"["', *body, '"]"'] + self._spell(markup.end)
        else:
            parts += body
        return _lark(parts, rules)

    def _call(self, markup: CallMarkup, tool: ToolSpec, free_text: bool) -> list[str]:
        """One call of one tool: markup and, between, arguments that are valid against its schema."""
        arguments = "%json " + _schema_text(self._tool_schema(tool))
        begin = [] if markup.array else self._spell(markup.begin)
        end = [] if markup.array else self._spell(markup.end)
        if free_text and begin:
            begin = self._spell(markup.begin[len(markup.trigger):])
        if markup.style == "named":
            return begin + self._spell(tool.name) + self._spell(markup.middle) + [arguments] + end
        if markup.style == "xml":
            return begin + self._xml(tool) + end
        head = '{"name": ' + json.dumps(tool.name, ensure_ascii=False) + f', "{markup.args_key}": '
        if free_text and not markup.begin:
            head = head[len(markup.trigger):]
        return begin + self._spell(head) + [arguments, '"}"'] + end

    def _free_text(self, markup: CallMarkup, any_call: str, rules: list[str], more: bool) -> str:
        """Text as the model likes until the trigger; from there a call; then text again."""
        times = "*" if more else "?"
        trigger = " ".join(self._spell(markup.trigger))
        if self._is_special(markup.trigger):
            rules = [f"tag: TEXT {trigger} {any_call}", *rules]
        else:
            rules = [f"opened[lazy]: TEXT {trigger}", f"tag: opened {any_call}", *rules]
        return _lark([f"tag{times} TEXT"], rules)

    def _xml(self, tool: ToolSpec) -> list[str]:
        """<function=name> with one <parameter=x> per argument, required ones first, each in the schema's order."""
        schema = self._tool_schema(tool)
        properties = schema.get("properties") if isinstance(schema.get("properties"), dict) else {}
        required = [n for n in schema.get("required", ()) if n in properties]
        out = self._spell(f"<function={tool.name}>\n")
        for name in [*required, *(n for n in properties if n not in required)]:
            kind = properties[name].get("type") if isinstance(properties[name], dict) else None
            if kind in ("integer", "number", "boolean", "object", "array"):
                value = ["%json " + _schema_text({**properties[name], **{k: schema[k] for k in ("$defs", "definitions")
                                                                         if k in schema}})] + self._spell("\n</parameter>\n")
            else:
                value = ["value"]           # text up to its closing tag
            part = " ".join(self._spell(f"<parameter={name}>\n") + value)
            out.append(part if name in required else f"({part})?")
        return out + self._spell("</function>")

    def _think(self, think: tuple[str, ...]) -> list[str]:
        """(open, close) or (close,): the thinking that comes before what is constrained."""
        if not think:
            return []
        *opening, close = think
        start = [p for o in opening for p in self._spell(o)]
        if self._is_special(close):
            return start + ["TEXT"] + self._spell(close) + ["GAP"]
        return start + ["thought", "GAP"]

    # -- pieces -------------------------------------------------------------------------------------------------------

    def _is_special(self, text: str) -> bool:
        return text in self._model.specials

    def _spell(self, text: str) -> list[str]:
        """`text` as grammar terms: the vocabulary's control tokens by id, the rest as strings."""
        if not text:
            return []
        specials = [s for s in self._model.specials if s and s in text]
        if not specials:
            return [json.dumps(text, ensure_ascii=False)]
        pattern = "(" + "|".join(re.escape(s) for s in sorted(specials, key=len, reverse=True)) + ")"
        return [f"<[{self._model.specials[p]}]>" if p in self._model.specials else json.dumps(p, ensure_ascii=False)
                for p in re.split(pattern, text) if p]

    def _tool_schema(self, tool: ToolSpec) -> dict[str, Any]:
        """The tool's schema as far as it can be followed; one odd tool never disables the others."""
        if tool.custom:
            return {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
                    "additionalProperties": False}
        schema = dict(tool.parameters) if isinstance(tool.parameters, dict) or tool.parameters else {}
        schema.setdefault("type", "object")
        problem = self._schema_problem(schema, lenient=True)
        if not problem:
            return schema
        log.once(f"schema {tool.name} {problem[:60]}", "the schema of tool %s is relaxed: %s", tool.name, problem[:200])
        return {"type": "object"}

    def _schema_problem(self, schema: Any, lenient: bool = False) -> str:
        """Why a schema can't be followed; "" where it can."""
        if not isinstance(schema, (dict, bool)):
            return "it is no object"
        if schema is False:
            return "it allows nothing"
        try:
            text = _schema_text(schema, lenient)
        except (ValueError, RecursionError) as e:
            return str(e)[:200]
        if len(text) > _MAX_SCHEMA:
            return f"it is longer than {_MAX_SCHEMA} bytes"
        bad, messages = LLMatcher.validate_grammar_with_warnings(_lark(["%json " + text]), None,
                                                                 limits=llguidance.LLParserLimits(**_LIMITS))
        return _first_line(messages) if bad else ""

    def _constraint(self, text: str, param: str) -> "MaskConstraint":
        matcher = LLMatcher(self._llguidance(), llguidance.grammar_from("lark", text), log_level=0,
                            limits=llguidance.LLParserLimits(**_LIMITS))
        if matcher.is_error():
            raise invalid(param, f"the grammar can't be followed: {_first_line([matcher.get_error()])}")
        return MaskConstraint(matcher, self._n_words)

    def _llguidance(self) -> LLTokenizer:
        """The vocabulary in llguidance's form; made at first use (about 0.1 s for 49,152 tokens)."""
        with self._lock:
            if self._tokenizer is None:
                wrapper = llguidance.TokenizerWrapper(_Vocabulary(self._model))
                self._tokenizer = LLTokenizer(wrapper, n_vocab=self._model.info.n_vocab,
                                              eos_token=sorted(self._model.eog) or [self._model.info.eos])
            return self._tokenizer


class _Vocabulary:
    """What llguidance.TokenizerWrapper asks of a tokenizer."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.eos_token_id = model.info.eos if model.info.eos >= 0 else next(iter(model.eog), 0)
        self.bos_token_id = model.info.bos if model.info.bos >= 0 else None
        self.tokens = [model.token_bytes(t) for t in range(model.info.n_vocab)]
        self.special_token_ids = [t for t in range(model.info.n_vocab) if model.is_control(t)]

    def __call__(self, text: bytes) -> list[int]:
        return self._model.tokenize(text)


class MaskConstraint:
    """One sequence's way through a grammar (engine.base.Constraint)."""

    def __init__(self, matcher: LLMatcher, n_words: int) -> None:
        self._matcher = matcher
        self._n_bytes = n_words * 4

    def mask(self) -> bytes | None:
        """The allowed next tokens. A matcher in error (a resource limit) lets everything through, logged once."""
        if self._matcher.is_error():
            log.once("grammar error", "a grammar hit a limit and no longer holds: %s",
                     _first_line([self._matcher.get_error()]))
            return None
        return self._matcher.compute_bitmask()[:self._n_bytes]

    def accept(self, token: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    def copy(self) -> "MaskConstraint":
        return MaskConstraint(self._matcher.deep_copy(), self._n_bytes // 4)


def _lark(parts: Iterable[str], rules: Iterable[str] = ()) -> str:
    """A grammar of these terms, with the shared rules that they name."""
    lines = ["%llguidance {}", "start: " + " ".join(parts), *rules]
    for name, rule in (("thought", 'thought[lazy]: TEXT "</think>"'), ("value", 'value[lazy]: TEXT "\\n</parameter>\\n"'),
                       ("GAP", r"GAP: /\n{0,2}/"), ("TEXT", f"TEXT: /{_TEXT}/")):
        if any(re.search(rf"(?<![\w\"]){name}(?![\w\"])", line) for line in lines):
            lines.append(rule)
    return "\n".join(lines) + "\n"


def _schema_text(schema: Any, lenient: bool = True) -> str:
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {**_JSON, "lenient": lenient}}
    return json.dumps(schema, allow_nan=False)


def _format_param(turn: Turn) -> str:
    return {"responses": "text.format", "messages": "output_config.format"}.get(turn.api, "response_format")


def _thinking(turn: Turn, family: Family) -> tuple[str, ...]:
    """What the family writes around its thinking, where it will think: (open, close), or (close,) where the prompt opens it."""
    if not family.thinks or turn.thinking is False or turn.prompt is not None:
        return ()
    return tuple(getattr(family, "thinking_markup", ("<think>", "</think>")))


def _first_line(messages: Iterable[str]) -> str:
    for message in messages:
        for line in message.splitlines():
            if line.strip():
                return line.strip()[:300]
    return "no reason given"
