"""`milad doctor`'s checks: machine, build, models, configuration, folders, a server and its four APIs, agents, leftovers.

Each check yields findings; a finding that is not fine says in one line what to do. "bad" is what keeps something from working,
"warn" what works worse than it could, "note" what is merely told. Everything together takes under 5 s where nothing answers.
Nothing is changed or written, and no file of the user's is read beside milad's own. Blocking; must not know the command line.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

from . import __version__, agents, catalogue, config, machine
from .agents import target as targets
from .errors import UsageError

AGENT_WINDOW = 32_768                        # agents open with 10,000 to 25,000 tokens
VERSION_S = 2.5
ANSWER_S = 60.0


@dataclass(frozen=True)
class Finding:
    name: str
    state: str                               # ok, note, warn, bad
    said: str
    do: str = ""                             # one line, where there is something to do

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def local(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Everything but the server, in the order in which a person reads it."""
    for check in (_machine, _huge_pages, _gpu, _build, _models, _configuration, _folders, _leftovers):
        try:
            yield from check()
        except Exception as e:               # a check of odd surroundings must not end the others
            yield Finding(check.__name__.strip("_"), "bad", f"the check itself failed: {type(e).__name__}: {e}", "please report this")
    yield from _agents(environ)


# This machine


def _machine() -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    said = f"{machine.processor()}, {os.cpu_count()} cores" + (f", {usable} usable" if usable != os.cpu_count() else "")
    if quota is not None and quota < usable:
        said += f", a cgroup allows {quota:g}"
    yield Finding("processor", "ok", said)
    available = machine.available_memory()
    small = available < 1 << 30
    yield Finding("memory", "warn" if small else "ok", f"{available / 1e9:.1f} GB available",
                  "end other programs, or use a smaller model or --ctx" if small else "")


def _cpu_quota() -> float | None:
    """Cores that the cgroup (v2) grants; None: no limit."""
    words = _text("/sys/fs/cgroup/cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None


def _huge_pages() -> Iterator[Finding]:
    text = _text("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = text[text.find("[") + 1:text.find("]")] if "[" in text else ""
    if not chosen:
        yield Finding("huge pages", "note", "this kernel does not tell")
    elif chosen == "never":
        yield Finding("huge pages", "warn", "transparent huge pages are off: large models run slower",
                      "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")
    else:
        yield Finding("huge pages", "ok", f"transparent: {chosen}")


def _gpu() -> Iterator[Finding]:
    names = []
    try:
        for folder in sorted(Path("/proc/driver/nvidia/gpus").iterdir()):
            fields = dict(line.split(":", 1) for line in _text(str(folder / "information")).splitlines() if ":" in line)
            names.append(fields.get("Model", "NVIDIA GPU").strip())
    except OSError:
        pass
    driver = _text("/proc/driver/nvidia/version").splitlines()
    if names:
        yield Finding("gpu", "note", ", ".join(names) + (f"; {driver[0]}" if driver else "") + "; this build computes on the processor")
    elif driver:
        yield Finding("gpu", "warn", f"a driver without a GPU: {driver[0]}", "nvidia-smi tells more")
    else:
        yield Finding("gpu", "note", "none: the model runs on the processor")


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return f.read(65536).strip()
    except OSError:
        return ""


# This program


def _build() -> Iterator[Finding]:
    where = Path(__file__).resolve().parent
    yield Finding("program", "ok", f"milad {__version__}, Python {sys.version.split()[0]}, {where}")
    try:
        from . import capi
        found = capi.devices()
        yield Finding("core", "ok", f"libmilad {capi.version()}, {found.get('isa')}, {found.get('usable', found.get('cores'))} threads")
    except Exception as e:                   # a missing or broken library comes as one of many kinds
        yield Finding("core", "bad", f"the native library can't be used: {' '.join(str(e).split())[:300]}",
                      "build again: scripts/zipapp --force")
    if importlib.util.find_spec("llguidance"):
        yield Finding("grammars", "ok", "JSON schemas and forced tool calls are enforced")
    else:
        yield Finding("grammars", "note", "llguidance is not packed: JSON schemas are asked for, not enforced",
                      "scripts/zipapp --grammar")


def _models() -> Iterator[Finding]:
    folder = catalogue.models_folder()
    have = catalogue.installed()
    if not have:
        yield Finding("models", "warn", f"none in {folder}", f"milad pull {catalogue.DEFAULT.name}")
    for found in have:
        try:
            with open(found.path, "rb") as f:
                head = f.read(8)
        except OSError as e:
            yield Finding("models", "bad", f"{found.path}: {e.strerror}", "make it readable, or remove it")
            continue
        if head[:4] != b"GGUF" or int.from_bytes(head[4:8], "little") not in (2, 3):
            yield Finding("models", "bad", f"{found.path} is no GGUF file of version 2 or 3", "remove it and fetch it again")
        else:
            yield Finding("models", "ok", f"{found.name}, {found.n_bytes / 1e6:.0f} MB")


def _configuration() -> Iterator[Finding]:
    try:
        options = config.load({})
    except UsageError as e:
        yield Finding("configuration", "bad", str(e), "mend that line; man milad.conf lists the options")
        return
    chosen = sorted({v.source for v in options.values() if v.source != "default"})
    yield Finding("configuration", "ok", "from " + ", ".join(chosen) if chosen else "all defaults")


def _folders() -> Iterator[Finding]:
    for name, kind, default in (("state folder", "STATE", ".local/state"), ("cache folder", "CACHE", ".cache"),
                                ("models folder", "DATA", ".local/share")):
        folder = catalogue.data_folder(kind, default)
        there = folder
        while not there.exists() and there != there.parent:
            there = there.parent
        if not os.access(there, os.W_OK | os.X_OK):
            yield Finding(name, "bad", f"{folder} can't be written (at {there})", f"chown it to you, or set XDG_{kind}_HOME")
            continue
        free = shutil.disk_usage(there).free
        full = free < 1 << 30
        yield Finding(name, "warn" if full else "ok", f"{folder}, {free / 1e9:.0f} GB free" + ("" if folder.exists() else ", not made yet"),
                      "free some space: prompts are cached there" if full else "")


def _leftovers() -> Iterator[Finding]:
    """Folders of earlier zipapps: each unpacks into its own under SHIV_ROOT."""
    root = Path(os.environ.get("SHIV_ROOT") or Path.home() / ".shiv")
    own = Path(__file__).resolve()
    try:
        old = [p for p in sorted(root.iterdir()) if p.is_dir() and p.name.startswith("milad") and p.resolve() not in own.parents]
    except OSError:
        old = []
    if old:
        yield Finding("leftovers", "warn", f"{len(old)} unpacked zipapps of earlier versions in {root}",
                      f"while no other milad runs: rm -r {root}/milad*")


# Agents


def _agents(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Which are installed, and their versions: asked all at once, with a home of their own, so that nothing is written."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="milad-doctor-", ignore_cleanup_errors=True) as home:
        threads = []
        for name in agents.NAMES:
            agent = agents.find(name)
            path = shutil.which(agent.program, path=environ.get("PATH"))
            if path:
                found[name] = "does not tell its version"
                threads.append(threading.Thread(target=_ask_version, args=([path, *agent.version], home, environ, found, name)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(VERSION_S + 1)
    for name in agents.NAMES:
        agent = agents.find(name)
        yield (Finding(f"agent {name}", "ok", f"{agent.title} {found[name]}", f"milad launch {name}") if name in found
               else Finding(f"agent {name}", "note", f"{agent.title} is not installed", agent.install))


def _ask_version(command: list[str], home: str, environ: Mapping[str, str], found: dict[str, str], name: str) -> None:
    kept = {k: v for k, v in environ.items() if k in ("PATH", "LANG", "LC_ALL", "NODE_OPTIONS")}
    try:
        done = subprocess.run(command, env={**kept, "HOME": home}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              errors="replace", timeout=VERSION_S, start_new_session=True)
    except (OSError, subprocess.TimeoutExpired):
        return
    words = [w for w in done.stdout.split() if w[:1].isdigit() or w[:1] == "v" and w[1:2].isdigit()]
    if done.returncode == 0 and words:
        found[name] = words[0].rstrip(".,;")[:40]
    elif done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        found[name] = f"does not start: {lines[0][:120] if lines else f'exit code {done.returncode}'}"


# A server


def server(kind: targets.Kind | None, root: str, *, model: str | None, key_env: str | None,
           environ: Mapping[str, str]) -> Iterator[Finding]:
    """What answers at `root`, as `kind` (None: milad, or what it turns out to be), down to one token on each API."""
    name = key_env or (kind or targets.KINDS["milad"]).key_env
    key = environ.get(name, "").strip() if name else ""
    try:
        is_kind, version = targets.identify(root, key)
    except targets.Down as e:
        wanted = kind or targets.KINDS["milad"]
        yield Finding("server", "bad", f"nothing answers at {root}: {e}", wanted.start.replace(" (or add --start)", ""))
        return
    actual = targets.KINDS[is_kind]
    if kind and kind.name not in (is_kind, "openai"):
        yield Finding("server", "bad", f"{root} is {actual.title}, not {kind.title}",
                      f"say --kind {is_kind}" + (", or another --url" if is_kind != "openai" else ""))
    else:
        yield Finding("server", "ok", f"{actual.title} {version}".strip() + f" at {root}")
    if not key_env and not kind:
        name = actual.key_env
        key = environ.get(name, "").strip() if name else ""
    told = targets.inspect(actual, root, key)
    if told.refused or not told.up:
        yield Finding("key", "bad", f"refused: {told.refused or told.why_down}",
                      f"put a valid key into {name or 'a variable'}" + ("" if name else " and name it with --api-key-env"))
        return
    if told.loading is not None:
        yield Finding("model", "bad", f"still loading ({told.loading:.0%})", "ask again in a moment")
        return
    yield _key(told, name)
    try:
        served = targets.served(told, model or (told.ids[0] if told.ids else None))
    except UsageError as e:
        yield Finding("model", "bad", str(e), "say --model NAME")
        return
    yield Finding("model", "ok", served + (f" (and {len(told.ids) - 1} more)" if len(told.ids) > 1 else ""))
    yield _context(told, served)
    yield from _apis(told, served)


def _key(told: targets.Server, name: str) -> Finding:
    if not told.key:
        return Finding("key", "ok", "none is needed")
    try:
        wrong = targets.ask(told.root, "/v1/models", told.key + "x").status
    except targets.Down:
        wrong = 0
    if wrong in (401, 403):
        return Finding("key", "ok", f"accepted (from ${name})")
    return Finding("key", "note", f"accepted, but so is any other: the server asks for none (${name} is set)")


def _context(told: targets.Server, served: str) -> Finding:
    n_ctx = targets.context_of(told, served)
    kind = told.kind
    if n_ctx is None:
        faults = {"ollama": "Ollama does not tell before the model is loaded, and gives 4,096 where nothing is set"}
        return Finding("context", "warn", faults.get(kind.name, "the server does not say what one request may hold"),
                       f"{kind.widen}; and tell agents with milad launch --ctx N")
    if n_ctx >= AGENT_WINDOW:
        return Finding("context", "ok", f"{n_ctx:,} tokens a request")
    slots = targets.ask(told.root, "/props", told.key).get("total_slots") if kind.name == "llamacpp" else None
    shared = f" (its {slots} slots share what -c gives)" if isinstance(slots, int) and slots > 1 else ""
    return Finding("context", "warn", f"{n_ctx:,} tokens a request{shared}: agents begin with 10,000 to 25,000", kind.widen)


_TOOL = {"type": "object", "properties": {}}
_ROUNDS: tuple[tuple[str, str, str, Callable[[str], dict[str, Any]]], ...] = (
    ("chat", "/v1/chat/completions", "OpenCode, pi, Qwen Code and aider need it",
     lambda m: {"model": m, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}),
    ("tools", "/v1/chat/completions", "agents can't work without",
     lambda m: {"model": m, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1,
                "tools": [{"type": "function", "function": {"name": "noop", "description": "Does nothing", "parameters": _TOOL}}]}),
    ("completions", "/v1/completions", "", lambda m: {"model": m, "prompt": "Hi", "max_tokens": 1}),
    ("responses", "/v1/responses", "Codex needs it", lambda m: {"model": m, "input": "Hi", "max_output_tokens": 16}),
    ("messages", "/v1/messages", "Claude Code needs it",
     lambda m: {"model": m, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}),
)
# What servers say, and what it means: faults by name.
_FAULTS = (
    ("--jinja", "start llama-server with --jinja: without it there are no tools"),
    ("enable-auto-tool-choice", "vllm serve ... --enable-auto-tool-choice --tool-call-parser NAME"),
    ("tool-call-parser", "vllm serve ... --enable-auto-tool-choice --tool-call-parser NAME"),
    ("does not support tools", "this model was not trained for tools: choose another"),
    ("not found, try pulling", "ollama pull MODEL"),
    ("requires more system memory", "a smaller model, or less context"),
)
_OLD = {"llamacpp": "a newer llama-server has it", "vllm": "a newer vLLM has it", "ollama": "a newer Ollama has it"}


def _apis(told: targets.Server, served: str) -> Iterator[Finding]:
    """One token on each API. A missing endpoint is found by an empty body first, which runs nothing."""
    for name, path, why, body in _ROUNDS:
        label = "tool calls" if name == "tools" else path
        needed = name != "completions"
        try:
            if targets.ask(told.root, path, told.key, {}).status in (404, 405, 501):
                yield Finding(label, "warn" if needed else "note", f"not there{why and ': ' + why}",
                              _OLD.get(told.kind.name, "another server, or milad") if needed else "")
                continue
            answer = targets.ask(told.root, path, told.key, body(served), timeout_s=ANSWER_S)
        except targets.Down as e:
            yield Finding(label, "bad", f"no answer: {e}", "its log may say why")
            continue
        if answer.status == 200 and isinstance(answer.value, dict):
            yield Finding(label, "ok", "answers")
        else:
            hint = next((do for word, do in _FAULTS if word in answer.message), "its log may say why")
            yield Finding(label, "bad", f"{answer.status}: {answer.message}", hint)
