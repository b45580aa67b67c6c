"""`milad ask "question"`: one question to a running daemon, or else to the model in this process.

stdin, where it is no terminal, is appended to the prompt. The answer streams to stdout and nothing else does.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
from typing import Any, Iterator
from urllib.parse import urlsplit

from ..errors import UsageError
from ..progress import bar
from . import flags

OWN = ("model", "family", "ctx", "threads", "kv_memory", "kv_type", "repack", "script", "tools", "temperature", "top_k",
       "top_p", "min_p", "repeat_penalty", "max_tokens", "template_date", "kv_cache_dir", "kv_cache_disk", "log_level")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = ("exit codes: 0 answered, 1 bad options or no model, 2 no question, or the command line can't be\n            read, "
                     "3 the server or the model failed, 4 the answer was cut by the limit\n\nexample:  git diff | milad ask \"review this\"")
    parser.add_argument("question", nargs="*", help="the question; stdin is appended where it is no terminal")
    parser.add_argument("--system", metavar="TEXT", help="a system prompt")
    parser.add_argument("--url", metavar="URL", default=os.environ.get("MILAD_URL"),
                        help="the daemon to ask (default: $MILAD_URL, else http://127.0.0.1:8000 if one answers there, else "
                             "the model runs in this process)")
    parser.add_argument("--seed", type=int, help="the same seed gives the same answer")
    parser.add_argument("-c", "--config", metavar="FILE", help="milad.conf to read")
    flags.add(parser, OWN)


def run(parsed: argparse.Namespace) -> int:
    question = " ".join(parsed.question)
    if not sys.stdin.isatty():
        try:
            piped = sys.stdin.buffer.read().decode("utf-8", "replace")
        except OSError:
            piped = ""
        question = f"{question}\n\n{piped}" if question and piped.strip() else question or piped
    if not question.strip():
        raise UsageError('ask what? `milad ask "question"`, or pipe something in', 2)
    options = flags.effective(parsed)
    value = {name: v.value for name, v in options.items()}
    messages = [{"role": "system", "content": parsed.system}] if parsed.system else []
    body: dict[str, Any] = {"messages": [*messages, {"role": "user", "content": question}], "stream": True}
    for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "max_tokens"):
        if value[name] is not None:
            body[name] = value[name]
    if parsed.seed is not None:
        body["seed"] = parsed.seed
    if value["model"]:
        body["model"] = value["model"][0]
    url = parsed.url or _running(value)
    if sys.stderr.isatty():
        body["return_progress"] = True
    if url is not None and (parsed.url or not _own_model(options)):
        return _print(_remote(url, body))
    return _local(options, body)


def _own_model(options: Any) -> bool:
    """The person named a file, a script or an engine setting: that is about this process, not about some daemon."""
    return any(options[name].source.startswith("flag") for name in ("model", "script", "family", "ctx", "threads", "kv_type",
                                                                   "kv_memory", "repack"))


def _running(value: dict[str, Any]) -> str | None:
    """The local daemon's URL, if one answers and has a model ready."""
    url = "http://127.0.0.1:8000"
    try:
        connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=0.3)
        connection.request("GET", "/version")
        reply = connection.getresponse()
        ours = "milad" in reply.read(4096).decode("utf-8", "replace") or reply.getheader("Server", "").startswith("milad")
        connection.close()
        return url if reply.status == 200 and ours else None
    except (OSError, http.client.HTTPException):
        return None


def _remote(url: str, body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(kind, text) pieces of a daemon's streamed chat completion; kind: text, thinking, end, or reading and queued, whose text
    is "done/total" tokens and the place in the queue."""
    try:
        parts = urlsplit(url if "//" in url else "http://" + url)
        port = parts.port
    except ValueError as e:
        raise UsageError(f"--url {url}: {e}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--url {url}: not an http:// or https:// address")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, port, timeout=600)
    base = parts.path.rstrip("/")
    path = (base if base.endswith("/v1") else base + "/v1") + "/chat/completions"
    headers = {"Content-Type": "application/json"}
    if os.environ.get("MILAD_API_KEY"):
        headers["Authorization"] = f"Bearer {os.environ['MILAD_API_KEY']}"
    try:
        connection.request("POST", path, json.dumps(body).encode(), headers)
        reply = connection.getresponse()
        if reply.status != 200:
            raise UsageError(f"{url}: {reply.status} {_message(reply.read(65536))}", 3)
        for line in reply:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield from _pieces(json.loads(line[6:]), url)
    except (OSError, http.client.HTTPException) as e:
        raise UsageError(f"{url}: {e or type(e).__name__}; is a daemon running there? `milad serve` starts one", 3) from e
    finally:
        connection.close()


def _pieces(chunk: dict[str, Any], url: str) -> Iterator[tuple[str, str]]:
    if "error" in chunk:
        raise UsageError(f"{url}: {chunk['error'].get('message', chunk['error'])}", 3)
    progress = chunk.get("prompt_progress")
    if isinstance(progress, dict):
        yield _progress(progress.get("processed"), progress.get("total"), progress.get("queued"))
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta", {})
        if delta.get("reasoning_content"):
            yield "thinking", delta["reasoning_content"]
        if delta.get("content"):
            yield "text", delta["content"]
        if choice.get("finish_reason"):
            yield "end", choice["finish_reason"]


def _progress(done: Any, total: Any, queued: Any) -> tuple[str, str]:
    return ("queued", str(queued)) if queued else ("reading", f"{done}/{total}")


def _message(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return raw[:200].decode("utf-8", "replace")


def _local(options: Any, body: dict[str, Any]) -> int:
    """The same request through the same rooms, without the sockets."""
    import asyncio
    import queue
    import threading

    from .. import loader, log
    from ..events import BlockStart, Delta, Event, Failure, Finish, Progress
    from ..mailbox import Mailbox
    from ..protocols import chat

    log.setup(options["log_level"].value if options["log_level"].source != "default" else "warning")
    pieces: "queue.Queue[Any]" = queue.Queue()

    async def generate() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        loaded = await asyncio.to_thread(loader.load, options, post=mailbox.post, progress=bar("loading"))
        try:
            prepared = loaded.runner.prepare(chat.Chat().parse(body), path="/v1/chat/completions")
            kinds: dict[int, str] = {}

            def read(events: list[tuple[int, Event]]) -> None:
                for _, event in events:
                    if isinstance(event, Progress):
                        pieces.put(_progress(event.done, event.total, event.queued))
                    elif isinstance(event, BlockStart):
                        kinds[event.index] = event.kind
                    elif isinstance(event, Delta):
                        pieces.put((kinds[event.index], event.text))
                    elif isinstance(event, Finish):
                        pieces.put(("end", event.reason))
                    elif isinstance(event, Failure):
                        raise UsageError(event.error.message, 3)

            await loaded.runner.run(prepared).read(read)
        finally:
            loaded.close()
            mailbox.close()

    def work() -> None:
        from ..errors import MiladError
        try:
            asyncio.run(generate())
        except MiladError as e:
            pieces.put(UsageError(e.message, 3))
        except BaseException as e:
            pieces.put(e)
        pieces.put(None)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def answers() -> Iterator[tuple[str, str]]:
        while (piece := pieces.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            yield piece

    code = _print(answers())
    thread.join(5)
    return code


def _print(pieces: Iterator[tuple[str, str]]) -> int:
    """The answer to stdout; thinking to stderr, dimmed, on a terminal only."""
    reason = ""
    thinking = sys.stderr.isatty()
    colour = thinking and "NO_COLOR" not in os.environ
    show, shown = bar("reading"), False
    last = "\n"
    for kind, text in pieces:
        if kind == "reading":
            done, _, total = text.partition("/")
            if done.isdecimal() and total.isdecimal() and int(done) < int(total):
                show(int(done) / int(total))
                shown = True
            continue
        if kind == "queued":
            if thinking:
                print(f"\r\x1b[Kplace {text} in the queue", end="", file=sys.stderr, flush=True)
                shown = True
            continue
        if shown:
            show(1.0)                               # wipes the line
            shown = False
        if kind == "end":
            reason = text
        elif kind == "thinking":
            if thinking:
                print(f"\x1b[2m{text}\x1b[0m" if colour else text, end="", file=sys.stderr, flush=True)
        elif kind == "text" and text:
            sys.stdout.buffer.write(text.encode("utf-8", "replace"))
            sys.stdout.buffer.flush()
            last = text
    if not last.endswith("\n"):
        sys.stdout.buffer.write(b"\n")
        sys.stdout.buffer.flush()
    if reason in ("length", "context"):
        print("milad: the answer was cut by the limit (--max-tokens, --ctx)", file=sys.stderr)
        return 4
    if not reason:
        print("milad: the connection ended before the answer did", file=sys.stderr)
        return 3
    return 0
