"""The default model over real sockets: every first-light endpoint, one seed one text, signals, disconnects."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from milad.http.server import Settings
from milad.options import BY_NAME

CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 24, "seed": 7}


def text_of(events):
    return "".join(c["delta"].get("content") or "" for _, e in events if e != "[DONE]" for c in e["choices"])


def test_chat_plain_equals_stream(real):
    status, body = real.json("POST", "/v1/chat/completions", CHAT)
    assert status == 200
    events = real.events("/v1/chat/completions", {**CHAT, "stream": True})
    assert events[-1] == ("", "[DONE]")
    assert text_of(events) == body["choices"][0]["message"]["content"] != ""


def test_completions_echo_scores_the_prompt(real):
    status, body = real.json("POST", "/v1/completions", {"prompt": "The capital of France is", "max_tokens": 1,
                                                         "temperature": 0, "echo": True, "logprobs": 1})
    assert status == 200
    choice = body["choices"][0]
    assert choice["text"] == "The capital of France is Paris"
    assert len(choice["logprobs"]["tokens"]) == 6 and choice["logprobs"]["token_logprobs"][0] is None
    assert all(p < 0 for p in choice["logprobs"]["token_logprobs"][1:])


def test_text_tools_round_trip(real):
    text = "Grüße, 世界 <|im_end|>"
    status, body = real.json("POST", "/tokenize", {"content": text})
    assert status == 200
    assert real.json("POST", "/detokenize", body) == (200, {"content": text})
    status, pieces = real.json("POST", "/tokenize", {"content": text, "with_pieces": True})
    assert [p["id"] for p in pieces["tokens"]] == body["tokens"]
    status, special = real.json("POST", "/tokenize", {"content": "<|im_end|>", "parse_special": True})
    assert len(special["tokens"]) == 1
    status, template = real.json("POST", "/apply-template", {"messages": [{"role": "user", "content": "Hi"}]})
    assert status == 200 and template["prompt"].endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert real.json("POST", "/detokenize", {"tokens": template["tokens"]})[1]["content"] == template["prompt"]


@pytest.mark.parametrize("path", ["/health", "/healthz", "/v1/models", "/props", "/version", "/"])
def test_get_and_head(real, path):
    status, headers, body = real.request("GET", path)
    assert status == 200 and body and headers["x-request-id"]
    status, headers, body = real.request("HEAD", path)
    assert status == 200 and not body


def test_same_seed_same_text_alone_and_beside_eight(real):
    alone = real.json("POST", "/v1/chat/completions", CHAT)[1]["choices"][0]["message"]["content"]
    found: list[str] = []
    others = [{**CHAT, "seed": i, "messages": [{"role": "user", "content": f"Tell me about the number {i}. " * (i + 1)}]}
              for i in range(8)]
    threads = [threading.Thread(target=real.json, args=("POST", "/v1/chat/completions", body)) for body in others]
    threads.insert(4, threading.Thread(
        target=lambda: found.append(real.json("POST", "/v1/chat/completions", CHAT)[1]["choices"][0]["message"]["content"])))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone]


@pytest.mark.parametrize("args", [("--threads", "1"), ("--parallel", "1", "--step-ms", "5")])
def test_same_seed_same_text_whatever_the_settings(real, start, args):
    expected = real.json("POST", "/v1/chat/completions", CHAT)[1]["choices"][0]["message"]["content"]
    other = start(args=args)
    try:
        assert other.json("POST", "/v1/chat/completions", CHAT)[1]["choices"][0]["message"]["content"] == expected
    finally:
        assert other.stop() == 0


def running(daemon) -> int:
    """Sequences in the engine, by the state that SIGUSR1 writes to the log."""
    before = len(daemon.log)
    os.kill(daemon.process.pid, signal.SIGUSR1)
    end = time.monotonic() + 5
    while time.monotonic() < end:
        lines = [line for line in daemon.log[before:].splitlines() if "state: n_running" in line]
        if lines:
            return int(lines[-1].split()[-1])
        time.sleep(0.02)
    raise AssertionError("no state in the log")


def wait_idle(daemon, timeout_s: float = 3.0) -> None:
    end = time.monotonic() + timeout_s
    while running(daemon):
        assert time.monotonic() < end, "the work went on after its client left"
        time.sleep(0.05)


@pytest.mark.parametrize("prompt,when", [("word " * 5000, "prefill"), ("Count to a thousand.", "decode")])
def test_a_closed_socket_stops_the_work(start, prompt, when):
    daemon = start(args=("--kv-cache-disk", "0"))
    try:
        body = json.dumps({"prompt": prompt, "max_tokens": 4000, "stream": True, "logit_bias": {"2": -100, "0": -100}}).encode()
        with socket.create_connection((daemon.host, daemon.port)) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                           + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            client.recv(1024)
            if when == "decode":
                client.recv(4096)
            end = time.monotonic() + 5
            while running(daemon) == 0 and time.monotonic() < end:
                pass
            assert running(daemon) == 1
        wait_idle(daemon)
        assert "milad" in daemon.json("GET", "/props")[1]["build_info"]
    finally:
        assert daemon.stop() == 0


def test_sigterm_ends_streams_with_the_protocols_error_event(start):
    daemon = start(args=("--drain-timeout", "0.3"))
    got: list[bytes] = []

    def read():
        got.append(daemon.request("POST", "/v1/chat/completions", {**CHAT, "max_tokens": 6000, "stream": True,
                                                                   "logit_bias": {"0": -100, "2": -100}})[2])
    thread = threading.Thread(target=read)
    thread.start()
    end = time.monotonic() + 5
    while running(daemon) == 0 and time.monotonic() < end:
        pass
    began = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - began < 5
    thread.join(5)
    last = got[0].decode().strip().split("\n\n")[-1]
    assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"], last


def test_nobody_who_reads_nothing_holds_the_end_up_beyond_five_seconds():
    assert BY_NAME["drain_timeout"].default + Settings().shutdown_s <= 4.5, "there is more to end than connections"


def run_milad(library, tmp_path, *args, env=None, stdin=b""):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MILA", "XDG"))}
    clean.update(PYTHONPATH=os.getcwd(), MILAD_LIBRARY=str(library), HOME=str(tmp_path), **(env or {}))
    return subprocess.run([sys.executable, "-m", "milad", *args], input=stdin, capture_output=True, env=clean, timeout=60)


def one_line(run):
    assert run.returncode == 1, run
    lines = run.stderr.decode().strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("milad: ") and not run.stdout, run.stderr
    return lines[0]


def test_without_a_model_one_line_says_what_to_pull(library, tmp_path):
    assert "milad pull smollm2" in one_line(run_milad(library, tmp_path, "serve", "--port", "0"))
    assert "milad pull smollm2" in one_line(run_milad(library, tmp_path, "ask", "x", env={"MILAD_PORT": "0"}))


def test_a_port_in_use_is_one_line(library, tmp_path, default_model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        line = one_line(run_milad(library, tmp_path, "serve", "--model", str(default_model), "--port",
                                  str(taken.getsockname()[1])))
    assert "in use" in line


@pytest.mark.parametrize("damage", ["empty", "truncated", "text"])
def test_a_damaged_model_is_one_line(library, tmp_path, default_model, damage):
    path = tmp_path / "bad.gguf"
    data = {"empty": b"", "text": b"hello" * 100, "truncated": None}[damage]
    if data is None:
        with open(default_model, "rb") as f:
            data = f.read(3_000_000)
    path.write_bytes(data)
    assert str(path) in one_line(run_milad(library, tmp_path, "serve", "--model", str(path), "--port", "0"))


def test_bad_configuration_is_one_line(library, tmp_path, default_model):
    conf = tmp_path / "milad.conf"
    conf.write_text("prot = 1\n")
    assert "did you mean port" in one_line(run_milad(library, tmp_path, "serve", "-c", str(conf)))
    conf.write_text("port = [\n")
    assert str(conf) in one_line(run_milad(library, tmp_path, "serve", "-c", str(conf)))
    assert "--ctx" in one_line(run_milad(library, tmp_path, "serve", "--ctx", "many", "--model", str(default_model)))


def test_ask_in_this_process_and_through_a_daemon(real, library, tmp_path, default_model):
    args = ("ask", "--temperature", "0", "--max-tokens", "12")
    own = run_milad(library, tmp_path, *args, "--model", str(default_model), "--kv-cache-disk", "0", stdin=b"What is 2+2?")
    assert own.returncode in (0, 4) and own.stdout.strip(), own.stderr
    remote = run_milad(library, tmp_path, *args, "--url", real.url, stdin=b"What is 2+2?")
    assert (remote.returncode, remote.stdout) == (own.returncode, own.stdout)


def test_ask_tells_what_is_wrong(library, tmp_path):
    run = run_milad(library, tmp_path, "ask", "--url", "http://127.0.0.1:9", "hello")
    assert run.returncode == 3 and b"milad serve" in run.stderr and not run.stdout
    assert run_milad(library, tmp_path, "ask").returncode == 2
