"""`milad top`: what a running daemon does, live: sequences, speed, cache, queue. One table and no end of it on a pipe: --once."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import socket
import sys
import time
from typing import Any
from urllib.parse import urlsplit

from ..errors import UsageError
from ..log import escape


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", default=os.environ.get("MILAD_URL", "http://127.0.0.1:8000"),
                        help="the daemon: http://, https:// or unix:/path (default: $MILAD_URL, else http://127.0.0.1:8000)")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="how often (default: 1)")
    parser.add_argument("--once", action="store_true", help="print once and end (always so where stdout is no terminal)")
    parser.epilog = "$MILAD_API_KEY is the key that is sent, where the daemon asks for one."


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=5)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(5)
        self.sock.connect(self._path)


def fetch(url: str) -> dict[str, Any]:
    """The daemon's /v1/milad/status. UsageError where there is none."""
    parts = urlsplit(url if url.startswith("unix:") or "//" in url else "http://" + url)
    headers = {"Authorization": f"Bearer {os.environ['MILAD_API_KEY']}"} if os.environ.get("MILAD_API_KEY") else {}
    connection: http.client.HTTPConnection
    if url.startswith("unix:"):
        connection = _Unix(url[5:])
    elif parts.scheme == "https" and parts.hostname:
        connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=5)
    elif parts.scheme == "http" and parts.hostname:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=5)
    else:
        raise UsageError(f"--url {url}: not an http://, https:// or unix: address")
    try:
        connection.request("GET", "/v1/milad/status", headers=headers)
        reply = connection.getresponse()
        data = reply.read(1 << 22)
        if reply.status != 200:
            hint = "; $MILAD_API_KEY is the key to send" if reply.status == 401 else ""
            raise UsageError(f"{url}: {reply.status} {reply.reason}{hint}", 3)
        found = json.loads(data)
        if not isinstance(found, dict) or found.get("object") != "milad.status":
            raise ValueError
        return found
    except (OSError, http.client.HTTPException) as e:
        raise UsageError(f"{url}: {e or type(e).__name__}; is a daemon running there?", 3) from e
    except ValueError:
        raise UsageError(f"{url}: that is no milad", 3) from None
    finally:
        connection.close()


def render(now: dict[str, Any], before: dict[str, Any] | None, width: int) -> list[str]:
    """The view as lines. before: an earlier answer, for rates; None: since the start."""
    model, engine = now.get("model", {}), now.get("engine", {})
    lines = [f"milad {now['version']}  pid {now['pid']}  up {_span(now['uptime_s'])}  {now['connections']} connections"]
    if now["state"] != "ready":
        return [*lines, f"loading: {now['progress']:.0%}"]
    old = (before or {}).get("engine", {})
    seconds = max(1e-3, now["uptime_s"] - before["uptime_s"]) if before else max(1e-3, now["uptime_s"])

    def rate(name: str) -> float:
        return max(0, engine.get(name, 0) - old.get(name, 0)) / seconds

    n_in, n_cached = engine["n_prompt_tokens"], engine["n_cached_tokens"]
    ttft, gap = now["time_to_first_token_s"], now["inter_token_s"]
    lines += [
        f"model    {model['id']}  {model['architecture']} {model['quantisation']}  context {model['context']:,}"
        + "".join(f"   {name}" for name in now["models"][1:]),
        f"running  {engine['n_running']} of {engine['parallel']}   waiting {engine['n_queued']} of {engine['queue_limit']}",
        f"speed    {rate('n_generated_tokens'):.1f} tokens/s out   {rate('n_prompt_tokens'):.1f} tokens/s in   "
        f"first token p50 {_ms(ttft['p50'])} p95 {_ms(ttft['p95'])}   next p50 {_ms(gap['p50'])} p95 {_ms(gap['p95'])}",
        f"prompts  {n_in + n_cached:,} tokens, {n_cached / max(1, n_in + n_cached):.0%} from the cache   answers "
        f"{engine['n_generated_tokens']:,} tokens   {engine['n_faults']} faults",
        f"blocks   {_bar(engine['n_blocks_held'], engine['n_blocks'], 24)} {engine['n_blocks_held']} used, "
        f"{engine['n_blocks_cached']} cached, {engine['n_blocks']} in all"
        + (f", {engine['disk']['n_bytes'] / 1e6:.0f} MB on disk" if "disk" in engine else ""),
        "", f"{'':>5}  {'CLIENT':<20} {'STATE':<8} {'PROMPT':>8} {'CACHED':>8} {'DONE':>6} {'ANSWER':>7}"]
    for s in now["sequences"]:
        done = min(1.0, s["n_computed"] / max(1, s["n_prompt"]))
        lines.append(f"{s['order']:>5}  {escape(s['client'])[:20]:<20} {s['state']:<8} {s['n_prompt']:>8} {s['n_cached']:>8} "
                     f"{done:>6.0%} {s['n_output']:>7}")
    return [line[:width] for line in lines]


def _span(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours // 24}d {hours % 24}h" if hours >= 24 else f"{hours}h {m:02}m" if hours else f"{m}m {s:02}s"


def _ms(seconds: float) -> str:
    return f"<{seconds * 1000:g} ms" if seconds else "-"


def _bar(part: int, whole: int, width: int) -> str:
    n = round(width * part / max(1, whole))
    return "[" + "#" * n + "." * (width - n) + "]"


def run(parsed: argparse.Namespace) -> int:
    if not 0.1 <= parsed.interval <= 3600:
        raise UsageError("--interval: between 0.1 and 3600 seconds", 2)
    before = None
    if parsed.once or not sys.stdout.isatty():
        print("\n".join(render(fetch(parsed.url), None, 200)))
        return 0
    sys.stdout.write("\x1b[?1049h\x1b[?25l")    # the alternate screen, without a cursor
    try:
        while True:
            now = fetch(parsed.url)
            size = shutil.get_terminal_size()
            lines = render(now, before, size.columns)[:size.lines - 1]
            sys.stdout.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
            sys.stdout.flush()
            before = now
            time.sleep(parsed.interval)
    finally:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
