"""Small servers that answer as other programs do, for what launch and doctor ask of them. Shapes after each program's own
documentation: llama.cpp tools/server/README.md, vLLM's OpenAI server, Ollama docs/api.md."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Callable

Routes = dict[str, Any]                      # "METHOD /path" -> body, (status, body), a function of (headers, body)


class Server:
    """A server on loopback; `asked` is what came: (method, path, headers, body)."""

    def __init__(self, routes: Routes, headers: dict[str, str] | None = None) -> None:
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.asked.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                found = routes.get(f"{self.command} {self.path}", routes.get("*") or (404, {"error": {"message": "not found"}}))
                if callable(found):
                    found = found(self.headers, body)
                status, value = found if isinstance(found, tuple) else (200, found)
                data = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                for name, text in (headers or {}).items():
                    self.send_header(name, text)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = answer

            def log_message(self, *args: Any) -> None:
                pass

            def version_string(self) -> str:
                return (headers or {}).get("Server", "test")

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def keyed(key: str, body: Any) -> Callable[[Any, bytes], Any]:
    """`body` for callers with the key, 401 for others."""
    return lambda headers, _: body if headers.get("Authorization") == f"Bearer {key}" else (
        401, {"error": {"message": "Invalid API Key", "type": "authentication_error"}})


BAD = (400, {"error": {"message": "messages is required", "type": "invalid_request_error"}})
CHAT = {"choices": [{"message": {"role": "assistant", "content": "Hi"}}]}


def models(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"object": "list", "data": [{"object": "model", **e} for e in entries]}


def apis(*names: str) -> Routes:
    """Endpoints that refuse an empty body and answer another one."""
    def one(_: Any, body: bytes) -> Any:
        return BAD if json.loads(body) == {} else CHAT
    return {f"POST /v1/{n}": one for n in names}


def llamacpp(**more: Any) -> Routes:
    return {"GET /props": {"default_generation_settings": {"n_ctx": 40960}, "total_slots": 1, "build_info": "b9000-abc"},
            "GET /v1/models": models({"id": "a.gguf", "meta": {"n_ctx_train": 131072}}),
            **apis("chat/completions", "responses", "messages"), **more}


def vllm(**more: Any) -> Routes:
    return {"GET /version": {"version": "0.20.0"}, "GET /v1/models": models({"id": "org/model", "max_model_len": 65536}),
            **apis("chat/completions", "responses", "messages"), **more}


def ollama(**more: Any) -> Routes:
    return {"GET /api/version": {"version": "0.14.2"}, "GET /v1/models": models({"id": "qwen3:8b"}, {"id": "gemma3:latest"}),
            "GET /api/ps": {"models": [{"name": "qwen3:8b", "model": "qwen3:8b", "context_length": 36864}]},
            "POST /api/show": {"parameters": "stop \"x\"\nnum_ctx                        49152",
                               "model_info": {"gemma3.context_length": 131072}},
            **apis("chat/completions", "responses", "messages"), **more}


def milad(**more: Any) -> Routes:
    return {"GET /props": {"default_generation_settings": {"n_ctx": 65536}, "build_info": "milad-0.1.0"},
            "GET /v1/models": models({"id": "small", "aliases": ["other"]}),
            **apis("chat/completions", "completions", "responses", "messages"), **more}
