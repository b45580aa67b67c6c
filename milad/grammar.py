"""Output held to a schema, regex, grammar or tool list: Turns become llguidance grammars, grammars become token masks.

The only user of llguidance (the optional extra milad[grammar]); importing this module without it raises ImportError. What
it owns: how a family's call markup is written as one Lark grammar, and what happens to a schema that the constrainer can't
follow (tools: relaxed with a log line; response_format: a 400).

Grammars are compiled in any thread but the event loop's: a costly one takes a second, without the GIL. What was compiled is
kept where it is large, since agents send the same tools every turn. A Constraint belongs to the engine thread; its first mask is
computed here.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from dataclasses import replace
from typing import Any, Iterable, Mapping

import llguidance
from llguidance import LLMatcher, LLTokenizer

from . import log
from .conversation import Format, Thinking, ToolSpec, Turn, argument_types, resolved
from .engine.base import Model
from .errors import MiladError, invalid
from .families.base import CallMarkup, Family
from .masks import CallWatch, MaskConstraint, first_line

# One spelling of JSON, so that a hot model can't wander off into white space for ever.
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Most parser items of a step: at 30,000 the worst grammars tried take 50 ms for a mask, ordinary ones 0.02 ms.
_LIMITS = dict(step_max_items=30_000, verbose_errors=False)
_MAX_SCHEMA = 200_000               # bytes of one schema: beyond it compiling takes seconds
_LARGE = 10_000                     # bytes of a schema that is tried out before it joins others
_MAX_LENGTH = 2000                  # of a string in XML arguments: longer limits are not held
_KEPT, _KEPT_BYTES = 16, 2_000_000  # compiled grammars: how many, of at most how many bytes of text each
_TEXT = r"(.|\n)*"
_SPELLABLE = re.compile(r"[^\s<>\"']([^<>\n]{0,198}[^\s<>\"'])?")  # as a parameter's name in its tag
_END_VALUE = "</parameter>"


class Grammar:
    """Compiles what a Turn asks of the output's form, for one model's vocabulary."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._closed = False
        self._n_words = (model.info.n_vocab + 31) // 32
        self._kept: OrderedDict[str, MaskConstraint] = OrderedDict()
        self._problems: OrderedDict[str, str] = OrderedDict()

    def compile(self, turn: Turn, family: Family) -> "MaskConstraint | CallWatch | None":
        """None: nothing to hold the output to. MiladError (400) for a contract that can't be kept."""
        try:
            return self._compile(turn, family)
        except (ValueError, TypeError, RuntimeError, RecursionError) as e:     # the library's own words for what it can't take
            raise invalid(_param(turn), f"the grammar can't be followed: {first_line([str(e)])}") from None

    def warm(self) -> None:
        """Does what the first constrained request would wait for. Any thread."""
        try:
            self._llguidance()
        except MiladError:                  # closed meanwhile
            pass

    def close(self) -> None:
        """Waits for warm(); the model may be closed afterwards. Nothing may be compiled any more."""
        with self._lock:
            self._closed = True

    def _compile(self, turn: Turn, family: Family) -> "MaskConstraint | CallWatch | None":
        mode = turn.tool_choice.mode if turn.tools else "none"
        if mode in ("required", "named"):
            tools = [t for t in turn.tools if mode == "required" or t.name == turn.tool_choice.name]
            if family.call_grammar(turn) is None:
                raise invalid("tool_choice", f"calls of the {family.name} format can't be forced")
            try:
                return self._constraint(self._forced(turn, family, tools), "tool_choice")
            except MiladError as e:
                return self._constraint(self._forced(turn, family, _relaxed(tools, e)), "tool_choice")
        if turn.format.kind != "text":
            try:
                return self._constraint(self._format(turn, family, mode == "auto"), _param(turn))
            except MiladError as e:
                if mode != "auto":
                    raise
                turn = replace(turn, tools=tuple(_relaxed(list(turn.tools), e)))
                return self._constraint(self._format(turn, family, True), _param(turn))
        markup = family.call_grammar(turn) if mode == "auto" else None
        if markup is None or not markup.trigger:
            return None
        try:
            return self._watch(markup, list(turn.tools))
        except MiladError as e:
            try:
                return self._watch(markup, _relaxed(list(turn.tools), e))
            except MiladError as e:          # in auto mode a grammar is a help, not a contract
                log.once(f"grammar {e.message[:80]}", "tool calls of this request are not constrained: %s", e.message)
        return None

    def _watch(self, markup: CallMarkup, tools: list[ToolSpec]) -> "CallWatch":
        rules: list[str] = []
        calls = self._constraint(_lark([self._any_call(markup, tools, rules, cut=len(markup.trigger) if markup.begin else 0)], rules), "")
        if markup.begin:
            opening = [(markup.trigger.encode(), b"")]
        else:                                # any JSON may begin so: only a tool's name makes it a call
            heads = ["".join(_head(markup, tool)).encode() for tool in tools]
            opening = [(head, head) for head in heads]
        special = self._model.specials.get(markup.trigger)
        return CallWatch(self._model, calls, () if special is not None else tuple(opening), special)

    # -- grammars as text ---------------------------------------------------------------------------------------------

    def _format(self, turn: Turn, family: Family, may_call: bool) -> str:
        """The answer in its form after the thinking; where tools may be called, calls instead of it."""
        form, param = turn.format, _param(turn)
        rules: list[str] = []
        start = self._think(turn, family, rules)
        answer, inner = self._answer(form, param, rules)
        if may_call:
            called = self._calls(family.call_grammar(turn), list(turn.tools), turn.parallel_tool_calls, rules)
            answer = [f"({' '.join(called)} | {' '.join(answer)})"]
        text = _lark(start + answer, rules)
        if inner is None:
            return text
        if not start and not may_call:
            return inner
        return json.dumps({"grammars": [{"lark_grammar": text}, {"name": "answer", "lark_grammar": inner}]})

    def _answer(self, form: Format, param: str, rules: list[str]) -> tuple[list[str], str | None]:
        """Terms of the answer, and the client's own grammar where they refer to it."""
        if form.kind in ("json_object", "json_schema"):
            schema = {"type": "object"} if form.kind == "json_object" else form.schema
            problem = self._schema_problem(schema)
            if problem:
                raise invalid(param, f"the JSON schema can't be followed: {problem}")
            return ["%json " + _schema_text(schema, lenient=False)], None
        if form.kind == "regex":
            # "dw": \d and \w are ASCII, as in JSON Schema and JavaScript
            rules.append(f"REGEX: /{llguidance.regex_to_lark(form.text, use_ascii='dw')}/")
            return ["REGEX"], None
        text = form.text
        if form.kind == "gbnf":
            from llguidance.gbnf_to_lark import any_to_lark
            try:
                text = any_to_lark(text)
            except Exception as e:           # its parser raises whatever it meets
                raise invalid(param, f"the grammar is not GBNF: {str(e)[:200]}") from None
        return ["@answer"], text

    def _forced(self, turn: Turn, family: Family, tools: list[ToolSpec]) -> str:
        rules: list[str] = []
        parts = self._think(turn, family, rules)
        return _lark(parts + self._calls(family.call_grammar(turn), tools, turn.parallel_tool_calls, rules), rules)

    def _calls(self, markup: CallMarkup, tools: list[ToolSpec], more: bool, rules: list[str]) -> list[str]:
        """One call or, with `more`, several."""
        any_call = self._any_call(markup, tools, rules)
        separator = self._spell(markup.separator) if markup.separator else []
        body = [any_call] + ([f"({' '.join(separator + [any_call])})*"] if more else [])
        if markup.array:
            return self._spell(markup.begin) + ['"["', *body, '"]"'] + self._spell(markup.end)
        return body

    def _any_call(self, markup: CallMarkup, tools: list[ToolSpec], rules: list[str], cut: int = 0) -> str:
        names = []
        for i, tool in enumerate(tools):
            names.append(f"call_{i}")
            rules.append(f"call_{i}: " + " ".join(self._call(markup, tool, cut, rules)))
        return "(" + " | ".join(names) + ")"

    def _call(self, markup: CallMarkup, tool: ToolSpec, cut: int, rules: list[str]) -> list[str]:
        """One call of one tool: markup, the first `cut` characters left out, and arguments that are valid against its schema."""
        begin = [] if markup.array else self._spell(markup.begin[cut:])
        end = [] if markup.array else self._spell(markup.end)
        schema = self._tool_schema(tool)
        if markup.style == "xml":
            return begin + self._xml(tool.name, schema, rules) + end
        arguments = "%json " + _schema_text(schema)
        if markup.style == "named":
            return begin + [_quoted(tool.name)] + self._spell(markup.middle) + [arguments] + end
        return begin + [*map(_quoted, _head(markup, tool)), arguments, '"}"'] + end

    def _xml(self, name: str, schema: Mapping[str, Any], rules: list[str]) -> list[str]:
        """<function=name> with one <parameter=x> per argument, required ones first, each in the schema's order."""
        properties = schema.get("properties")
        # a name with tags' own characters can't be read back
        properties = {k: v for k, v in properties.items() if _SPELLABLE.fullmatch(k)} if isinstance(properties, Mapping) else {}
        required = [n for n in schema.get("required", ()) if n in properties]
        kinds = argument_types(schema)
        out = [_quoted(f"<function={name}>\n")]
        for key in [*required, *(n for n in properties if n not in required)]:
            value = self._xml_value(schema, properties[key], kinds[key], rules)
            part = " ".join([_quoted(f"<parameter={key}>\n"), *value, '"\\n"'])
            out.append(part if key in required else f"({part})?")
        return [*out, '"</function>"']

    def _xml_value(self, root: Mapping[str, Any], schema: Any, kinds: frozenset[str], rules: list[str]) -> list[str]:
        """A value and its closing tag: JSON where it can be no string, else text, which ends at the first tag that closes it."""
        close = _quoted("\n" + _END_VALUE)
        if kinds and "string" not in kinds:
            inner = {**schema, **{k: root[k] for k in ("$defs", "definitions") if k in root}}
            return ["value"] if self._schema_problem(inner, lenient=True) else ["%json " + _schema_text(inner), close]
        schema = resolved(schema, root)
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        texts = [c for c in choices if isinstance(c, str) and _END_VALUE not in c
                 and not ("null" in kinds and c.strip().lower() in ("null", "none"))] if isinstance(choices, (list, tuple)) else []
        if texts:
            return ["(" + " | ".join(map(_quoted, [*texts, *(["null"] if "null" in kinds else [])])) + ")", close]
        pattern = self._text_pattern(schema) if kinds <= {"string", "null"} else ""
        if not pattern:
            return ["value"]
        name = f"value_{len(rules)}"
        rules += [f"{name.upper()}: {pattern} & ~/{_TEXT}<\\/parameter>{_TEXT}/", f"{name}[lazy]: {name.upper()} {close}"]
        return [name]

    def _text_pattern(self, schema: Mapping[str, Any]) -> str:
        """A terminal for a string's length and its pattern where that is anchored at both ends; "": any text."""
        def size(key: str) -> int | None:
            n = schema.get(key)
            return n if isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= _MAX_LENGTH else None

        low, high = size("minLength"), size("maxLength")
        terms = []
        if low or high is not None:
            terms.append(f"/(.|\\n){{{min(low or 0, high) if high is not None else low},{'' if high is None else high}}}/")
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and len(pattern) <= _MAX_LENGTH and re.fullmatch(r"\^[^|]*[^\\|]\$", pattern):
            term = f"/{llguidance.regex_to_lark(pattern[1:-1], use_ascii='dw')}/"
            if not self._grammar_problem(f"start: P\nP: {term}\n"):
                terms.append(term)
        return " & ".join(terms)

    def _think(self, turn: Turn, family: Family, rules: list[str]) -> list[str]:
        """The thinking that comes before what is constrained; nothing where the family will not think."""
        markup = _thinking(turn, family)
        if not markup:
            return []
        *opening, close = markup
        start = [p for o in opening for p in self._spell(o)]
        if self._is_special(close):
            return start + ["TEXT"] + self._spell(close) + ["GAP"]
        rules.append(f"thought[lazy]: TEXT {_quoted(close)}")
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
            return [_quoted(text)]
        pattern = "(" + "|".join(re.escape(s) for s in sorted(specials, key=len, reverse=True)) + ")"
        return [f"<[{self._model.specials[p]}]>" if p in self._model.specials else _quoted(p)
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
        return self._grammar_problem(_lark(["%json " + text]))

    def _grammar_problem(self, text: str) -> str:
        """Why a grammar can't be followed, "" where it can. What it follows in part only is logged."""
        with self._lock:
            known = self._problems.get(text)
        if known is not None:
            return known
        bad, messages = LLMatcher.validate_grammar_with_warnings(llguidance.grammar_from("lark", text), None,
                                                                 limits=llguidance.LLParserLimits(**_LIMITS))
        problem = first_line(messages) if bad else ""
        if messages and not bad:
            log.once(f"grammar warning {messages[0][:80]}", "a schema is relaxed: %s", first_line(messages))
        if not bad and len(text) > _LARGE:
            matcher = LLMatcher(self._llguidance(), llguidance.grammar_from("lark", text), log_level=0,
                                limits=llguidance.LLParserLimits(**_LIMITS))
            problem = MaskConstraint(matcher, self._n_words, "").prepare(self._model)
        self._keep(self._problems, text, problem, 16 * _KEPT)
        return problem

    def _keep(self, kept: OrderedDict[str, Any], text: str, value: Any, most: int) -> None:
        if len(text) > _KEPT_BYTES // 8:
            return
        with self._lock:
            kept[text] = value
            kept.move_to_end(text)
            while len(kept) > most or sum(map(len, kept)) > _KEPT_BYTES:
                kept.popitem(last=False)

    def _constraint(self, text: str, param: str) -> "MaskConstraint":
        """`text`: Lark, or llguidance's JSON. param: whose contract it is; "": a help, given up where it hits a limit."""
        with self._lock:
            known = self._kept.get(text)
            if known is not None and known.family.fresh():
                self._kept.move_to_end(text)
                return known.copy(param)
        matcher = LLMatcher(self._llguidance(), text if text.startswith('{"grammars"') else llguidance.grammar_from("lark", text),
                            log_level=0, limits=llguidance.LLParserLimits(**_LIMITS))
        made = MaskConstraint(matcher, self._n_words, param)
        problem = made.prepare(self._model)
        if problem:
            raise invalid(param, f"the grammar can't be followed: {problem}")
        if len(text) > _LARGE:
            self._keep(self._kept, text, made, _KEPT)
        return made.copy(param)

    def _llguidance(self) -> LLTokenizer:
        """The vocabulary in llguidance's form; made at first use (0.3 s for 49,152 tokens), in two calls, since each of them
        keeps the GIL (45 and 70 ms)."""
        with self._lock:
            if self._closed:
                raise MiladError("unavailable", "the server is shutting down")
            if self._tokenizer is None:
                wrapper = llguidance.TokenizerWrapper(_Vocabulary(self._model))
                bare = LLTokenizer(wrapper, n_vocab=self._model.info.n_vocab, slices=[],
                                   eos_token=sorted(self._model.eog) or [self._model.info.eos])
                self._tokenizer = bare.with_slices(LLTokenizer.general_slices())
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


def _lark(parts: Iterable[str], rules: Iterable[str] = ()) -> str:
    """A grammar of these terms, with the shared rules that they name."""
    lines = ["%llguidance {}", "start: " + " ".join(parts), *rules]
    for name, rule in (("value", f"value[lazy]: TEXT {_quoted(_END_VALUE)}"), ("GAP", r"GAP: /\n{0,2}/"), ("TEXT", f"TEXT: /{_TEXT}/")):
        if any(re.search(rf"(?<![\w\"]){name}(?![\w\"])", line) for line in lines):
            lines.append(rule)
    return "\n".join(lines) + "\n"


def _head(markup: CallMarkup, tool: ToolSpec) -> list[str]:
    """A call in JSON up to its arguments, one term per JSON token as in a schema's own terms: an answer that begins alike
    ({"name": ...) stays possible beside it."""
    return ["{", '"name"', ": ", json.dumps(tool.name, ensure_ascii=False), ", ", f'"{markup.args_key}"', ": "]


def _quoted(text: str) -> str:
    """A string as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def _relaxed(tools: list[ToolSpec], why: MiladError) -> list[ToolSpec]:
    """The tools with any object for arguments: together their schemas are too much."""
    log.once(f"tools relaxed {why.message[:60]}", "the schemas of %d tools are relaxed: %s", len(tools), why.message)
    return [t if t.custom else replace(t, parameters={"type": "object"}) for t in tools]


def _schema_text(schema: Any, lenient: bool = True) -> str:
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {**_JSON, "lenient": lenient}}
    return json.dumps(schema, allow_nan=False)


def _param(turn: Turn) -> str:
    """Where the client wrote the form of its answer."""
    return {"responses": "text.format", "messages": "output_config.format"}.get(turn.api, "response_format")


def _thinking(turn: Turn, family: Family) -> tuple[str, ...]:
    """What the family writes around its thinking, where it will think: (open, close), or (close,) where the prompt opens it."""
    if not family.thinks or turn.thinking is False or turn.prompt is not None:
        return ()
    markup = tuple(getattr(family, "thinking_markup", ("<think>", "</think>")))
    if turn.prefill:                        # the answer has begun already, or its thinking has
        parts = turn.messages[-1].parts if turn.messages else ()
        return markup[-1:] if parts and isinstance(parts[-1], Thinking) else ()
    return markup
