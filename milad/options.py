"""The one table of options: it feeds the flags, milad.conf, the environment, the man page, `serve -T` and completion.

Pure: values come in as text or as TOML values and leave checked. Where a value came from is kept beside it, so that an
error and `serve -T` can say so.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Mapping

from .errors import UsageError


@dataclass(frozen=True)
class Option:
    name: str                                # as in milad.conf; the flag is --name with - for _
    kind: str                                # str, path, int, float, bool, size, seconds, choice, mode, list
    default: Any
    help: str                                # one line; the man page adds "The default is ..."
    group: str = "Serving"
    choices: tuple[str, ...] = ()
    minimum: float = -math.inf
    maximum: float = math.inf
    metavar: str = ""
    reload: bool = False                     # SIGHUP takes a new value
    env: tuple[str, ...] = ()                # names of Mila's server, besides MILAD_<NAME>
    shown: str = ""                          # the default in words, where the value says too little
    unset: bool = False                      # None is a value: decided later (from the model, the memory)

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


@dataclass(frozen=True)
class Value:
    value: Any
    source: str                              # "default", "flag --port", "MILAD_PORT", "/etc/milad/milad.conf"


_MB = 1 << 20
OPTIONS: tuple[Option, ...] = (
    Option("model", "list", (), "the model to serve: a GGUF file or a name that `milad models` lists, or `ID=FILE`; of several the "
           "first stays loaded, the others are loaded when a request names them", "Model",
           metavar="FILE|NAME", env=("MILA_MODEL", "MILA_MODEL_PATH"), shown="the one model in the models folder"),
    Option("model_name", "str", None, "the id that clients see", "Model", metavar="ID", env=("MILA_MODEL_NAME",), unset=True,
           shown="the model's name in the catalogue, or its file's name"),
    Option("model_aliases", "list", (), "further ids that clients may use for it", "Model", metavar="ID", shown="none"),
    Option("models_dir", "path", None, "folder that `milad pull` fills and model names are looked up in", "Model", metavar="DIR",
           unset=True, shown="milad/models under the data folder"),
    Option("idle_unload", "seconds", 600.0, "models besides the first are unloaded when nobody used them for so long; 0: never",
           "Model", minimum=0, maximum=1e7, metavar="SECONDS", reload=True),
    Option("models_memory", "size", None, "most memory for all loaded models; idle ones go to make room", "Model", minimum=1 * _MB,
           metavar="SIZE", unset=True, shown="the memory that is free"),
    Option("family", "str", None, "the chat format, where the file's template is not recognised", "Model",
           metavar="NAME", unset=True, shown="what the file's template says"),
    Option("ctx", "int", None, "tokens that one request may use, prompt and answer together", "Model", minimum=64,
           maximum=1 << 24, metavar="N", env=("MILA_CONTEXT_LENGTH",), unset=True,
           shown="the model's training length, or what the memory allows"),
    Option("threads", "int", None, "threads that compute", "Model", minimum=1, maximum=512, metavar="N", unset=True,
           shown="one per physical core within the cgroup's quota"),
    Option("parallel", "int", 4, "requests that generate at once", "Model", minimum=1, maximum=256, metavar="N"),
    Option("kv_memory", "size", None, "memory for the context of all requests, as 2G or 512M", "Model",
           minimum=1 * _MB, metavar="SIZE", unset=True, shown="ctx times parallel, at most half of the free memory"),
    Option("kv_type", "choice", "auto", "how keys and values are kept; q8_0 takes half the memory", "Model",
           choices=("auto", "f16", "bf16", "q8_0"), shown="auto: q8_0 where the processor has AVX-512 VNNI, else f16"),
    Option("repack", "bool", True, "lay the weights out anew for this machine's kernels; off: run from the mapped file, slower",
           "Model"),
    Option("mlock", "bool", False, "keep the weights from being swapped out", "Model"),
    Option("script", "path", None, "play this JSON Lines file instead of computing, to test an agent's plumbing", "Model",
           metavar="FILE", unset=True, shown="none: the model computes"),

    Option("host", "str", "127.0.0.1", "address to listen on, or unix:/path/of/socket", metavar="ADDRESS", env=("MILA_HOST",)),
    Option("port", "int", 8000, "port to listen on; 0: any free one", minimum=0, maximum=65535, metavar="N", env=("MILA_PORT",)),
    Option("socket_mode", "mode", 0o660, "permissions of a unix socket, in octal", minimum=0, maximum=0o777, metavar="MODE"),
    Option("socket_group", "str", None, "group of a unix socket", metavar="GROUP", unset=True, shown="the daemon's own"),
    Option("protocols", "list", (), "serve these APIs only: chat, completions, responses, messages; openai stands for the first "
           "three, anthropic for the last", choices=("chat", "completions", "responses", "messages", "openai", "anthropic"),
           metavar="NAME", reload=True, env=("MILA_PROTOCOL",), shown="all"),
    Option("pid_file", "path", None, "file that holds the daemon's process id, locked while it runs", metavar="FILE",
           unset=True, shown="none"),
    Option("keepalive", "seconds", 5.0, "silence after which a stream gets its protocol's sign of life", minimum=0.05,
           maximum=240, metavar="SECONDS", reload=True, env=("MILA_KEEPALIVE_INTERVAL",)),
    Option("tools", "choice", "auto", "show the client's tools to the model: auto decides by the model's training",
           choices=("auto", "on", "off"), reload=True, env=("MILA_TOOL_CALLING_ENABLED",)),
    Option("queue_limit", "int", 64, "requests that may wait; one more gets 429 or 529 with Retry-After", minimum=1,
           maximum=100_000, metavar="N", reload=True),
    Option("queue_timeout", "seconds", 600.0, "longest wait in the queue", minimum=1, maximum=86_400, metavar="SECONDS",
           reload=True),
    Option("step_ms", "int", None, "longest step while a stream is being read: bounds how many prompt tokens a step takes",
           minimum=5, maximum=10_000, metavar="MS", unset=True,
           shown="twice a step without a prompt, 20 at least, so that no stream's gap exceeds 3 times its pace"),
    Option("speculate", "bool", True, "guess tokens from the sequence's own text and verify several in one step; the answer is "
           "the same", "Model"),
    Option("kv_cache_dir", "path", None, "folder where known prompts survive restarts", "Cache", metavar="DIR", unset=True,
           shown="milad/kv under the cache folder"),
    Option("kv_cache_disk", "size", 4 << 30, "most disk space for it; 0: none", "Cache", minimum=0, metavar="SIZE"),
    Option("strict_model_names", "bool", False, "answer 404 to model names that are not served", reload=True),
    Option("keys_file", "path", None, "API keys that clients must send, one a line; `milad key` writes it", "Security",
           metavar="FILE", reload=True, unset=True, shown="none: no key is asked for"),
    Option("insecure_no_key", "bool", False, "allow an address that other machines reach without asking for a key", "Security"),
    Option("tls_cert", "path", None, "certificate chain (PEM): serve HTTPS, TLS 1.2 or newer", "Security", metavar="FILE",
           reload=True, unset=True, shown="none: plain HTTP"),
    Option("tls_key", "path", None, "the certificate's private key (PEM)", "Security", metavar="FILE", reload=True, unset=True,
           shown="the file of tls_cert"),
    Option("allowed_hosts", "list", (), "further names that a Host header may carry", "Security", metavar="NAME", reload=True,
           shown="none: loopback names and the bound address"),
    Option("allowed_origins", "list", (), "web origins that may call from a browser", "Security", metavar="ORIGIN", reload=True,
           shown="none"),
    Option("body_limit", "size", 16 * _MB, "longest request body", "Security", minimum=1024, maximum=1 << 30, metavar="SIZE"),
    Option("max_connections", "int", 512, "connections open at once; one more closes the longest idle one, or is refused",
           "Security", minimum=1, maximum=100_000, metavar="N"),
    Option("drain_timeout", "seconds", 4.0, "time that running answers get when the daemon is asked to stop", minimum=0,
           maximum=3600, metavar="SECONDS", reload=True),

    Option("temperature", "float", None, "sampling temperature where the client sends none", "Sampling", minimum=0,
           maximum=100, metavar="T", env=("MILA_DEFAULT_TEMPERATURE",), reload=True, unset=True,
           shown="the file's own, else 0.7"),
    Option("top_k", "int", None, "keep this many best tokens; 0: all", "Sampling", minimum=0, maximum=1 << 20, metavar="K",
           env=("MILA_DEFAULT_TOP_K",), reload=True, unset=True, shown="the file's own, else 40"),
    Option("top_p", "float", None, "keep the best tokens up to this probability", "Sampling", minimum=0, maximum=1,
           metavar="P", env=("MILA_DEFAULT_TOP_P",), reload=True, unset=True, shown="the file's own, else 0.95"),
    Option("min_p", "float", None, "drop tokens below this share of the best one's probability", "Sampling", minimum=0,
           maximum=1, metavar="P", reload=True, unset=True, shown="the file's own, else 0"),
    Option("repeat_penalty", "float", None, "penalty on tokens that stand in the context already; 1: none", "Sampling",
           minimum=0.01, maximum=100, metavar="X", reload=True, unset=True, shown="the file's own, else 1"),
    Option("max_tokens", "int", None, "longest answer where the client sends no limit", "Sampling", minimum=1,
           maximum=1 << 24, metavar="N", env=("MILA_DEFAULT_MAX_NEW_TOKENS",), reload=True, unset=True,
           shown="the room left in the context"),
    Option("template_date", "choice", "fixed", "the date that some chat formats show the model; today's empties the prompt "
           "cache every midnight", "Sampling", choices=("fixed", "today"), reload=True),
    Option("completions_specials", "bool", True, "on /v1/completions the prompt may spell control tokens", "Sampling",
           reload=True),

    Option("log_level", "choice", "info", "how much the log says", "Log", choices=("debug", "info", "warning", "error"),
           reload=True, env=("MILA_LOG_LEVEL",)),
    Option("log_format", "choice", "text", "text, or one JSON object a line", "Log", choices=("text", "json")),
    Option("log_file", "path", None, "append to this file, opened anew by SIGHUP, instead of stderr", "Log", metavar="FILE",
           unset=True, shown="none: stderr"),
    Option("log_prompts", "bool", False, "write request bodies to the log, prompts and all", "Log", reload=True),
)
BY_NAME = {o.name: o for o in OPTIONS}

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def convert(option: Option, raw: Any, source: str) -> Any:
    """raw (text, or a TOML value) as the option's type; UsageError names option and source."""
    def bad(expected: str) -> UsageError:
        return UsageError(f"{source}: {option.name} = {str(raw)[:80]!r} is not {expected}")

    kind = option.kind
    if kind == "list":
        items = raw if isinstance(raw, (list, tuple)) else [raw]
        if not all(isinstance(i, str) and i and "\0" not in i for i in items):
            raise bad("a list of texts")
        if option.choices:
            items = [word for i in items for word in i.lower().replace(",", " ").split()]
            if not set(items) <= set(option.choices):
                raise bad("among " + ", ".join(option.choices))
        return tuple(items)
    if kind in ("str", "path"):
        if not isinstance(raw, str) or not raw or "\0" in raw:
            raise bad("a text")
        return raw
    if kind == "bool":
        if isinstance(raw, bool):
            return raw
        word = str(raw).strip().lower()
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
        raise bad("true or false")
    if kind == "choice":
        word = ("on" if raw else "off") if isinstance(raw, bool) else str(raw).strip().lower()
        if option.name == "tools" and word in _TRUE | _FALSE:        # MILA_TOOL_CALLING_ENABLED=true
            word = "on" if word in _TRUE else "off"
        if word not in option.choices:
            raise bad("one of " + ", ".join(option.choices))
        return word
    value = _number(option, raw, bad)
    if not option.minimum <= value <= option.maximum:
        low, high = (f"{n:.0f}" if n == n // 1 else f"{n:g}" for n in (option.minimum, option.maximum))
        finite = math.isfinite(option.minimum), math.isfinite(option.maximum)
        raise bad(f"between {low} and {high}" if all(finite) else f"at least {low}" if finite[0] else f"at most {high}")
    return value


def _number(option: Option, raw: Any, bad: Callable[[str], UsageError]) -> Any:
    if isinstance(raw, bool):
        raise bad("a number")
    text = str(raw).strip()
    try:
        if option.kind == "size":
            digits = text.lower().removesuffix("ib").removesuffix("b")
            unit = digits[-1:] if digits[-1:] in _UNITS and digits[-1:] else ""
            value = float(digits.removesuffix(unit)) * _UNITS[unit]
            if not math.isfinite(value):
                raise ValueError
            return int(value)
        if option.kind == "int":
            return int(text, 10)
        if option.kind == "mode":             # TOML knows 0o660 as a number, and "0660" as a text
            return raw if isinstance(raw, int) else int(text.removeprefix("0o"), 8)
        value = float(text.removesuffix("s") if option.kind == "seconds" else text)
        if not math.isfinite(value):
            raise ValueError
        return value
    except (ValueError, OverflowError):
        raise bad({"size": "a size such as 512M or 4G", "int": "a whole number", "mode": "permissions in octal such as 0660",
                   "seconds": "a number of seconds"}.get(option.kind, "a number")) from None


def unknown(name: str, source: str) -> UsageError:
    near = difflib.get_close_matches(name.lower(), BY_NAME, n=1)
    return UsageError(f"{source}: there is no option {name[:60]!r}" + (f"; did you mean {near[0]}?" if near else ""))


def merge(*layers: tuple[str, Mapping[str, Any]]) -> dict[str, Value]:
    """Layers of (source, values), the weakest first, over the defaults. A source may hold {name}, for the flag or variable."""
    values = {o.name: Value(o.default, "default") for o in OPTIONS}
    for source, layer in layers:
        for name, raw in layer.items():
            if name not in BY_NAME:
                raise unknown(name, source.replace("{name}", name))
            said = source.replace("{name}", BY_NAME[name].flag)
            values[name] = Value(convert(BY_NAME[name], raw, said), said)
    return values


# Variables of Mila's server that milad has no use for, and why.
IGNORED_ENV = {
    "MILA_TOKENIZER_PATH": "a GGUF file brings its tokenizer along",
    "MILA_MODEL_FAMILY": "milad reads it from the file; the option family overrides that",
    "MILA_DEVICE_INDEX": "milad chooses by itself",
}
# MILAD_ variables that are no options.
OTHER_ENV = {"MILAD_LIBRARY", "MILAD_API_KEY", "MILAD_URL", "MILAD_TEST_CACHE", "MILAD_TEST_ZIPAPP"}


def from_environment(env: Mapping[str, str]) -> list[tuple[str, dict[str, str]]]:
    """MILAD_<NAME>, and the names of Mila's server, each as a layer of its own; MILAD_ wins. Empty values count as unset. A list
    is split at commas."""
    layers: list[tuple[str, dict[str, Any]]] = []
    for prefix_pass in (False, True):
        for option in OPTIONS:
            names: Iterable[str] = (f"MILAD_{option.name.upper()}",) if prefix_pass else option.env
            for name in names:
                if env.get(name):
                    value: Any = env[name]
                    if option.kind == "list" and option.name != "model":   # a path may have a comma
                        value = [part.strip() for part in value.split(",") if part.strip()]
                    layers.append((name, {option.name: value}))
    return layers


def environment_notes(env: Mapping[str, str]) -> list[str]:
    """A line for each variable that looks as if it were meant for milad, and does nothing."""
    notes = [f"{name} is ignored: {why}" for name, why in IGNORED_ENV.items() if env.get(name)]
    known = {f"MILAD_{o.name.upper()}" for o in OPTIONS} | {n for o in OPTIONS for n in o.env}
    for name in sorted(env):
        if name.startswith(("MILAD_", "MILA_")) and env[name] and name not in known | OTHER_ENV | set(IGNORED_ENV):
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            if near or name.startswith("MILAD_"):
                notes.append(f"{escaped(name)[:60]} is no option of milad's" + (f"; did you mean {near[0]}?" if near else ""))
    return notes


def escaped(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def toml(option: Option, value: Any) -> str:
    """`value` as milad.conf would have it."""
    if option.kind == "bool":
        return "true" if value else "false"
    if option.kind == "mode":
        return f'"{value:04o}"'
    if option.kind == "list":
        return "[" + ", ".join(_quoted(v) for v in value) + "]"
    if option.kind in ("str", "path", "choice"):
        return _quoted(value)
    if option.kind == "size":
        return next((f'"{value >> shift}{unit}"' for shift, unit in ((30, "G"), (20, "M"), (10, "K"))
                     if value and value % (1 << shift) == 0), str(value))
    return f"{value:g}" if isinstance(value, float) and value < 1e6 else str(value)


def _quoted(text: str) -> str:
    """A TOML basic string."""
    out = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04X}" if ord(c) < 65536 else f"\\U{ord(c):08X}" for c in out) + '"'


def effective_text(values: Mapping[str, Value]) -> str:
    """`milad serve -T`: a milad.conf that says what is in force, with each value's origin; unset ones are comments."""
    lines = []
    for group, members in groups().items():
        lines += [""] * bool(lines) + [f"# {group}"]
        for option in members:
            value = values[option.name]
            if value.value is None or (option.kind == "list" and not value.value):
                lines.append(f"# {option.name}: {option.shown}")
            else:
                lines.append(f"{option.name} = {toml(option, value.value)}  # {escaped(value.source)}")
    return "\n".join(lines) + "\n"


def groups() -> dict[str, list[Option]]:
    """The table by group, in order of first appearance."""
    found: dict[str, list[Option]] = {}
    for option in OPTIONS:
        found.setdefault(option.group, []).append(option)
    return found
