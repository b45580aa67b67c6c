"""`milad launch AGENT`: runs a coding agent on a local server, without touching the user's own settings."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from urllib.parse import urlsplit

from .. import agents, catalogue
from ..agents import base, run as running, shell, target as targets
from ..errors import UsageError

APIS = {"messages": "/v1/messages", "responses": "/v1/responses", "chat": "/v1/chat/completions"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "milad launch [AGENT [options] [-- arguments for the agent]]"
    parser.epilog = ("agents: " + ", ".join(agents.NAMES) + "; without one they are listed\n\n"
                     "Address, key and model are the command's; of everything else the agent is told, what your environment says\n"
                     "already wins. Your own settings files are not edited.\n\n"
                     "example:  milad launch claude -- --continue")
    parser.add_argument("agent", nargs="?", metavar="AGENT", help="the agent to run")
    parser.add_argument("--model", metavar="NAME", help="the model to use (default: the one served)")
    parser.add_argument("--url", metavar="URL", help="the server, with or without /v1 (default: $MILAD_URL, else the kind's usual "
                        "address)")
    parser.add_argument("--kind", metavar="KIND", help="what serves there: " + ", ".join(targets.KINDS) + " (default: milad)")
    parser.add_argument("--api-key-env", metavar="NAME", help="the variable that holds the server's key (default: the kind's own, "
                        "as MILAD_API_KEY)")
    parser.add_argument("--ctx", type=int, metavar="N", help="tokens of one request (default: what the server says)")
    parser.add_argument("--dry-run", action="store_true", help="print the command with its environment, secrets masked, and end")
    parser.add_argument("--start", action="store_true", help="where no daemon answers, start one for the agent's life")


def run(parsed: argparse.Namespace) -> int:
    if parsed.agent is None:
        return _list()
    agent = agents.find(parsed.agent)
    if parsed.ctx is not None and parsed.ctx < 64:
        raise UsageError(f"--ctx {parsed.ctx} is not a context: at least 64")
    kind = targets.kind_of(parsed.kind or "milad")
    url = parsed.url or (os.environ.get("MILAD_URL") if kind.name == "milad" else "") or kind.url
    if not url:
        raise UsageError("--kind openai needs --url")
    root = targets.root_of(url)
    if not parsed.kind:
        kind = _recognised(kind, root)
    if not parsed.dry_run:
        path = running.executable(agent, os.environ)
    daemon = _started(parsed, kind, root)
    try:
        target, server = _resolved(parsed, kind, root)
        _check_api(agent, target, server)
        folder = catalogue.data_folder("STATE", ".local/state") / "agents" / agent.name
        plan = agent.plan(target, parsed.rest, folder, os.environ)
        _notes(agent, kind, target, plan)
        if parsed.dry_run:
            sys.stdout.write(shell.script(plan, target, os.environ))
            return 0
        environment = plan.environment(os.environ)
        if daemon is not None:
            return running.beside(plan, path, environment, daemon)
        running.become(plan, path, environment)
        return 1
    finally:
        if daemon is not None:
            running.end(daemon)


def say(line: str) -> None:
    print(f"milad: {line}", file=sys.stderr, flush=True)


def _list() -> int:
    """Every agent: is it here, and how does one get it."""
    width = max(map(len, agents.NAMES))
    for name in agents.NAMES:
        agent = agents.find(name)
        path = shutil.which(agent.program)
        print(f"{name:<{width}}  {agent.title:<12}  {path or 'not installed: ' + agent.install}")
    return 0


def _recognised(kind: targets.Kind, root: str) -> targets.Kind:
    """The kind of what answers at `root`, where nobody said one."""
    try:
        name, version = targets.identify(root, os.environ.get(kind.key_env, ""))
    except targets.Down:
        return kind
    if name != "milad":
        say(f"{root} is {targets.KINDS[name].title}{version and ' '}{version}: going on as --kind {name}")
    return targets.KINDS[name]


def _started(parsed: argparse.Namespace, kind: targets.Kind, root: str):
    """The daemon of --start, ready; None where one answers already or none is wanted."""
    if not parsed.start or parsed.dry_run:
        return None
    parts = urlsplit(root)
    if kind.name != "milad" or parts.scheme != "http" or parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        raise UsageError("--start starts milad on this machine: it goes with --kind milad and a loopback address")
    try:
        targets.ask(root, "/health")
        return None
    except targets.Down:
        pass
    options = ["--host", "127.0.0.1" if parts.hostname == "localhost" else parts.hostname, "--port", str(parts.port or 80)]
    options += ["--model", parsed.model] if parsed.model else []
    options += ["--ctx", str(parsed.ctx)] if parsed.ctx else []
    log = catalogue.data_folder("STATE", ".local/state") / "launch.log"
    daemon = running.start(options, root, log, say)
    if parsed.model:
        parsed.model = None                  # a path, maybe: the daemon's own name for it counts
    return daemon


def _resolved(parsed: argparse.Namespace, kind: targets.Kind, root: str) -> tuple[base.Target, targets.Server]:
    waiting = False
    while True:
        target, server = targets.resolve(kind, root, model=parsed.model, ctx=parsed.ctx, key_env=parsed.api_key_env,
                                         environ=os.environ)
        if server.loading is None or parsed.dry_run:
            break
        if not waiting:
            say(f"{root} is loading its model; waiting")
        waiting = True
        time.sleep(0.3)
    if not target.up:
        said = f"no server answers at {root} ({server.why_down}); {kind.start}"
        if not parsed.dry_run:
            raise UsageError(said)
        say(said)
    return target, server


def _check_api(agent: base.Agent, target: base.Target, server: targets.Server) -> None:
    """Refuses, in one line, a server that lacks the endpoint that the agent lives on."""
    if target.kind == "milad" or agent.api == "chat":
        return
    known = targets.has_api(server, agent.api) if target.up else None
    if known is False or known is None and target.kind == "openai":
        raise UsageError(f"{agent.title} needs {APIS[agent.api]}, which {target.root} does not have: milad, and newer versions of "
                         "llama.cpp, vLLM and Ollama, do")


def _notes(agent: base.Agent, kind: targets.Kind, target: base.Target, plan: base.Plan) -> None:
    for line in plan.notes:
        say(line)
    if target.context is None and target.up:
        say(f"{target.root} does not say how much one request may hold: tell {agent.title} with --ctx N")
    elif target.context is not None and target.context < agent.window:
        say(f"one request holds {target.context:,} tokens; {agent.title} wants {agent.window:,} or more: {kind.widen}")
    changed = [name for name, value in plan.fixed.items() if os.environ.get(name, value) != value]
    if changed:
        say("set aside for this launch, from your environment: " + ", ".join(changed))
