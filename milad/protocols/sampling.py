"""The fields about length, sampling and the answer's form that the protocols share, with their ranges.

Documented clamps: max_tokens -1 means no limit of the client's (as llama.cpp and LM Studio send it) and what is above 2^31-1
becomes that; top_k -1 means off; seed -1 means a random one; seeds of 64 bits, signed or not, are taken as they are. All
else out of range is a 400 that names the field. Pure.
"""

from __future__ import annotations

from typing import Any

from ..conversation import Format, Sampling
from .fields import INT32_MAX, Obj, bad, check_integer, check_json, check_number, check_text, kind_of

MAX_STOPS = 16           # llama.cpp has no limit, OpenAI 4: each costs a search per token
MAX_STOP_CHARS = 1000
MAX_BIAS = 1024          # OpenAI's clients send a few hundred at most
MAX_TOP_LOGPROBS = 20    # the core's MILAD_MAX_TOP
MAX_CHOICES = 16         # of one request: each is a sequence of its own


def read_sampling(body: Obj) -> Sampling:
    """temperature 0..2, top_p and min_p 0..1, top_k, penalties (OpenAI's -2..2; repeat > 0..10), seed, logit_bias."""
    repeat = "repetition_penalty" if body.has("repetition_penalty") else "repeat_penalty"
    top_k = body.integer("top_k", -1, INT32_MAX)
    seed = body.integer("seed", -2**63, 2**64 - 1)
    return Sampling(
        temperature=body.number("temperature", 0, 2),
        top_k=None if top_k is None else max(0, top_k),
        top_p=body.number("top_p", 0, 1),
        min_p=body.number("min_p", 0, 1),
        repeat_penalty=body.number(repeat, 0.01, 10),
        presence_penalty=body.number("presence_penalty", -2, 2),
        frequency_penalty=body.number("frequency_penalty", -2, 2),
        seed=None if seed in (None, -1) else seed % 2**64,
        logit_bias=_bias(body))


def _bias(body: Obj) -> tuple[tuple[int, float], ...]:
    """OpenAI's {"token id": -100..100}; llama.cpp's [[id, bias], ...] as well."""
    value = body.raw("logit_bias")
    if value is None:
        return ()
    path = body.at("logit_bias")
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list) and all(isinstance(p, list) and len(p) == 2 for p in value):
        pairs = [(p[0], p[1]) for p in value]
    else:
        raise bad(path, f"must be an object of token ids and numbers, not {kind_of(value)}")
    if len(pairs) > MAX_BIAS:
        raise bad(path, f"has {len(pairs)} entries, more than {MAX_BIAS}")
    out: dict[int, float] = {}
    for key, bias in pairs:
        if isinstance(key, str):
            if not (key.isascii() and key.isdigit() and len(key) < 11):
                raise bad(path, f"{key[:40]!r} is no token id")
            key = int(key)
        at = f"{path}.{key}" if isinstance(key, int) else path
        out[check_integer(key, path, 0, INT32_MAX)] = check_number(bias, at, -100, 100)
    return tuple(sorted(out.items()))


def read_max_tokens(body: Obj, *keys: str, least: int = 1) -> int | None:
    """The first of `keys` that is set."""
    for key in keys:
        value = body.raw(key)
        if value is None:
            continue
        if value == -1 and not isinstance(value, bool):
            return None
        return body.integer(key, least, INT32_MAX, clamp=True)
    return None


def read_stops(body: Obj, key: str) -> tuple[str, ...]:
    """A string, or up to 16 of them; empty ones stop nothing."""
    value = body.raw(key)
    if value is None:
        return ()
    if isinstance(value, str):
        found = [body.text(key, most=MAX_STOP_CHARS)]
    else:
        found = []
        for i, stop in enumerate(body.items(key, MAX_STOPS)):
            path = f"{body.at(key)}[{i}]"
            if len(check_text(stop, path)) > MAX_STOP_CHARS:
                raise bad(path, f"is longer than {MAX_STOP_CHARS} characters")
            found.append(stop)
    return tuple(dict.fromkeys(s for s in found if s))


def read_thinking(body: Obj) -> tuple[bool | None, dict[str, Any]]:
    """(False: switched off, None or True: on where the family has it; chat_template_kwargs with reasoning_effort).

    All of these are understood in every protocol: thinking.type, reasoning.effort, reasoning_effort, enable_thinking,
    chat_template_kwargs.enable_thinking. Any that says off wins. Budgets are read and ignored."""
    kwargs = body.obj("chat_template_kwargs")
    args: dict[str, Any] = dict(check_json(kwargs.data, kwargs.path)) if kwargs else {}
    said: list[bool] = []
    for source in (kwargs, body):
        if source is not None and source.boolean("enable_thinking") is not None:
            said.append(bool(source.boolean("enable_thinking")))
    thinking = body.obj("thinking")
    if thinking is not None:
        said.append(thinking.text("type") != "disabled")
    efforts = [body.text("reasoning_effort")]
    for key in ("reasoning", "output_config"):
        section = body.obj(key)
        if section is not None:
            efforts.append(section.text("effort"))
    for effort in efforts:
        if effort:
            said.append(effort != "none")
            args.setdefault("reasoning_effort", effort)
    return (False if False in said else True if said else None), args


def read_format(value: Obj | None) -> Format:
    """A response_format (chat), text.format (responses) or output_config.format (messages): text, json_object,
    json_schema, and milad's own regex, lark and gbnf."""
    if value is None:
        return Format()
    kind = value.required_text("type")
    if kind == "text":
        return Format()
    if kind == "json_object" and not value.has("schema"):
        return Format("json_object")
    if kind in ("json_schema", "json_object"):
        inner = value.obj("json_schema") or value               # chat nests it, responses and messages don't
        if inner.raw("schema") is None:
            raise inner.error("schema", "is required")
        return Format("json_schema", schema=read_schema(inner, "schema"), name=inner.text("name"))
    if kind in ("regex", "lark", "gbnf"):
        key = next((k for k in ("pattern", "regex", "grammar", "definition") if value.has(k)), "grammar")
        return Format(kind, text=value.required_text(key))
    raise value.error("type", f"{kind[:40]!r} is no known format: text, json_object, json_schema, regex, lark, gbnf")


def read_schema(owner: Obj, key: str) -> Any:
    """A JSON schema: an object or a boolean."""
    schema = owner.raw(key)
    if not isinstance(schema, (dict, bool)):
        raise owner.error(key, f"must be a JSON schema (an object), not {kind_of(schema)}")
    return check_json(schema, owner.at(key))
