"""Running milad as a service: notify, sockets, signals, reload, keys, TLS, pid file, log, metrics."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import socket
import ssl
import stat
import threading
import time
from pathlib import Path

import pytest

import service
from milad.cli import main as cli
from service import CHAT, SLOW_CHAT, Service, certificate, make_key, start, trusting  # noqa: F401

needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make a certificate with")


@pytest.fixture(autouse=True)
def log_restored():
    from milad import log
    handlers, level, propagate = log.logger.handlers[:], log.logger.level, log.logger.propagate
    yield
    log.logger.handlers[:], log.logger.level, log.logger.propagate = handlers, level, propagate


def failing(tmp_path: Path, model: Path, library: Path, *args: str) -> tuple[int, str]:
    """A start that must not get ready: (exit code, stderr)."""
    with Service(tmp_path / "failing", model, library, *args, ready=False) as one:
        return one.process.wait(30), one.log


# Manners


def test_notify_watchdog_state_and_the_end(start) -> None:
    one = start(env={"WATCHDOG_USEC": "100000"})
    assert any(m.startswith("STATUS=loading") for m in one.messages)
    assert "STATUS=serving" in one.messages[-1]
    one.wait("WATCHDOG=1")
    one.signal(signal.SIGUSR1)
    one.wait_log("state: n_running 0")
    assert one.end() == 0
    one.messages.clear()
    one.wait("STOPPING=1")
    assert "ended" in one.log


def test_a_step_that_hangs_is_told(start) -> None:
    """The watchdog is fed no more and /health says why; streams get signs of life, and their error event at the end."""
    one = start("--keepalive", "0.2", "--drain-timeout", "0.5", env={"WATCHDOG_USEC": "2000000"},
                script=[{"output": "a b c d", "when": {"last": "slow"}, "hang_after": 2}])
    one.wait("WATCHDOG=1")
    stream = service.connect(one.port)
    stream.request("POST", "/v1/chat/completions", json.dumps(SLOW_CHAT), {"Content-Type": "application/json"})
    reply = stream.getresponse()
    end = time.monotonic() + 20
    while (found := one.ask("/health"))[0] == 200 and time.monotonic() < end:
        time.sleep(0.1)
    assert found[0] == 503 and json.loads(found[1])["status"] == "error" and b"in one step" in found[1]
    with pytest.raises(AssertionError):
        for _ in range(4):                     # what was sent before
            one.wait("WATCHDOG=1", 2.5)
    one.signal(signal.SIGTERM)
    sent = reply.read()
    assert sent.count(b"chat.completion.chunk") > 5 and b"shutting down" in sent
    assert one.process.wait(20) == 0 and "hangs in a step" in one.wait_log("it may hang")


def test_told_to_end_while_loading(start) -> None:
    """Wherever in its start the signal comes: 0, and nothing left."""
    for word in ("STATUS=loading", "EXTEND_TIMEOUT_USEC"):
        one = start("--pid-file", f"/tmp/milad-test-{os.getpid()}.l", "--kv-cache-disk", "0", script=False, ready=False)
        one.wait(word)
        assert one.end() == 0 and not os.path.exists(f"/tmp/milad-test-{os.getpid()}.l")
        assert "Traceback" not in one.log


def test_sockets_of_a_service_manager(start, tmp_path: Path) -> None:
    tcp, local = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    path = f"/tmp/milad-test-{os.getpid()}.sock"
    local.bind(path)
    local.listen()
    try:
        one = start(fds=[os.dup(tcp.fileno()), os.dup(local.fileno())], env={"LISTEN_FDNAMES": "tcp:local"})
        assert one.ask("/health", port=tcp.getsockname()[1])[0] == 200
        assert one.ask("/health", unix=path)[0] == 200
        assert one.end() == 0 and os.path.exists(path)       # not ours to remove
    finally:
        os.unlink(path)


def test_sigterm_lets_answers_end_and_cuts_the_rest_with_an_error_event(start) -> None:
    one = start("--drain-timeout", "0.5")
    bodies: dict[str, bytes] = {}
    paths = {"/v1/chat/completions": SLOW_CHAT, "/v1/messages": {**SLOW_CHAT, "max_tokens": 500}, "/v1/responses": {"input": "slow", "stream": True}}
    threads = [threading.Thread(target=lambda p=p, b=b: bodies.update({p: one.ask(p, b)[1]})) for p, b in paths.items()]
    for thread in threads:
        thread.start()
    while json.loads(one.ask("/v1/milad/status")[1])["engine"]["n_generated_tokens"] < 3:
        time.sleep(0.02)
    assert one.end() == 0
    for thread in threads:
        thread.join(10)
    assert b'"error"' in bodies["/v1/chat/completions"] and b"event: error" in bodies["/v1/messages"]
    assert b"response.failed" in bodies["/v1/responses"]
    assert all(b"shutting down" in body for body in bodies.values())


def test_a_second_sigterm_ends_at_once(start) -> None:
    one = start("--drain-timeout", "3600", "--pid-file", "pid")
    stream = service.connect(one.port)
    stream.request("POST", "/v1/chat/completions", json.dumps(SLOW_CHAT), {"Content-Type": "application/json"})
    stream.getresponse().read(10)
    one.signal(signal.SIGTERM)
    one.wait_log("finishing what runs")
    one.signal(signal.SIGTERM)
    assert one.process.wait(10) == 3 and not Path("pid").exists()


def test_pid_file(start, tmp_path: Path, default_model: Path, library: Path) -> None:
    pid = tmp_path / "milad.pid"
    pid.write_text("99999999\n")                # a dead one's
    one = start("--pid-file", str(pid))
    assert int(pid.read_text()) == one.process.pid
    code, text = failing(tmp_path, default_model, library, "--pid-file", str(pid))
    assert code == 1 and str(one.process.pid) in text
    assert int(pid.read_text()) == one.process.pid
    one.process.kill()
    one.process.wait()
    two = start("--pid-file", str(pid))         # kill -9 leaves the file, not the lock
    assert two.end() == 0 and not pid.exists()


@pytest.mark.parametrize("args,code,words", [
    (("--host", "0.0.0.0"), 1, "insecure-no-key"), (("--host", "127.0.0.1,::"), 1, "insecure-no-key"), (("--host", "no.invalid"), 1, "no.invalid"),
    (("--host", "unix:/nonexistent/x"), 1, "/nonexistent/x"), (("--keys-file", "/nonexistent"), 1, "/nonexistent"),
    (("--tls-cert", "/nonexistent"), 1, "/nonexistent"), (("--tls-cert", "/dev/null"), 1, "/dev/null"),
    (("--pid-file", "/nonexistent/x"), 1, "/nonexistent/x"), (("--log-file", "/nonexistent/x"), 1, "/nonexistent/x"),
    (("--socket-group", "nosuchgroup", "--host", "unix:/tmp/milad-test-g"), 1, "nosuchgroup"), (("--port", "x"), 1, "--port"),
    (("--prot", "1"), 2, "did you mean --port?"), (("-c", "/nonexistent"), 1, "/nonexistent")])
def test_exit_codes_and_one_line(default_model: Path, library: Path, capsys, args, code, words) -> None:
    try:
        got = cli.main(["serve", "--model", str(default_model), *args])
    except SystemExit as e:                     # argparse
        got = e.code
    err = capsys.readouterr().err
    assert got == code and words in err and "milad: " in err and (code == 2 or err.count("\n") == 1)


def test_a_broken_model_file(tmp_path: Path, library: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    code, text = failing(tmp_path, tmp_path / "bad.gguf", library)
    assert code == 1 and "bad.gguf" in text and "Traceback" not in text


# Unix sockets


def test_a_unix_socket_beside_a_port(start, tmp_path: Path, default_model: Path, library: Path) -> None:
    path = f"/tmp/milad-test-{os.getpid()}.u"
    args = ("--host", f"127.0.0.1,unix:{path}", "--socket-mode", "0620", "--socket-group", str(os.getgid()))
    one = start(*args)
    status = os.stat(path)
    assert stat.S_IMODE(status.st_mode) == 0o620 and status.st_gid == os.getgid()
    assert one.ask("/v1/chat/completions", CHAT, unix=path)[0] == one.ask("/v1/chat/completions", CHAT)[0] == 200
    code, text = failing(tmp_path, default_model, library, *args)
    assert code == 1 and "in use" in text
    one.process.kill()
    one.process.wait()
    assert os.path.exists(path)
    two = start(*args)                          # a dead daemon's socket is replaced
    assert two.ask("/health", unix=path)[0] == 200
    assert two.end() == 0 and not os.path.exists(path)


# Keys


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_keys_limits_and_reload(start, tmp_path: Path, capsys, monkeypatch) -> None:
    keys = tmp_path / "keys"
    alice = make_key(keys, "alice")
    bob = make_key(keys, "bob", "--rpm", "2")
    one = start("--keys-file", str(keys), "--host", "0.0.0.0")          # with keys other machines may come
    path = "/v1/chat/completions"
    assert one.ask("/health")[0] == 200 and one.ask("/metrics")[0] == 401 and one.ask(path, CHAT)[0] == 401
    assert one.ask(path, CHAT, bearer(alice))[0] == one.ask(path, CHAT, {"x-api-key": alice})[0] == 200
    assert [one.ask(path, CHAT, bearer(bob))[0] for _ in range(3)] == [200, 200, 429]
    assert one.ask("/metrics", headers=bearer(bob))[0] == 200           # the limit is for answers
    make_key(keys, "carol")
    assert cli.main(["key", "remove", "alice", "--keys-file", str(keys)]) == 0
    assert cli.main(["key", "remove", "alice", "--keys-file", str(keys)]) == 1
    assert cli.main(["key", "add", "bob", "--keys-file", str(keys)]) == 1
    own = "my-own-key-of-some-length"
    monkeypatch.setattr("sys.stdin", io.StringIO(own + "\n"))
    assert cli.main(["key", "add", "dave", "--stdin", "--keys-file", str(keys)]) == 0
    assert one.ask(path, CHAT, bearer(alice))[0] == 200
    one.reload()
    assert one.ask(path, CHAT, bearer(alice))[0] == 401 and one.ask(path, CHAT, bearer(own))[0] == 200
    keys.chmod(0o644)
    one.reload()
    one.wait_log("chmod 600")
    assert one.ask(path, CHAT, bearer(own))[0] == 200                   # the old keys go on
    assert alice not in one.log and own not in one.log and "dave" in one.log
    assert cli.main(["key", "list", "--keys-file", str(keys)]) == 1
    keys.chmod(0o600)
    capsys.readouterr()
    assert cli.main(["key", "list", "--keys-file", str(keys)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["bob", "carol", "dave"]


def test_a_keys_parallel_limit(start, tmp_path: Path) -> None:
    key = make_key(tmp_path / "keys", "one", "--parallel", "1")
    one = start("--keys-file", str(tmp_path / "keys"))
    stream = service.connect(one.port)
    stream.request("POST", "/v1/chat/completions", json.dumps(SLOW_CHAT), {"Content-Type": "application/json", **bearer(key)})
    stream.getresponse().read(10)
    status, body = one.ask("/v1/messages", {**CHAT, "max_tokens": 5}, {"x-api-key": key})
    assert status == 429 and json.loads(body)["error"]["type"] == "rate_limit_error"
    stream.close()
    end = time.monotonic() + 10
    while one.ask("/v1/chat/completions", CHAT, bearer(key))[0] != 200:
        assert time.monotonic() < end
        time.sleep(0.05)


# TLS


@needs_openssl
def test_tls_and_a_new_certificate(start, tmp_path: Path) -> None:
    (cert, key), (new_cert, new_key) = certificate(tmp_path, "one"), certificate(tmp_path, "two")
    path = f"/tmp/milad-test-{os.getpid()}.t"
    one = start("--tls-cert", str(cert), "--tls-key", str(key), "--host", f"127.0.0.1,unix:{path}")
    assert "https://127.0.0.1" in one.log
    status, body = one.ask("/v1/chat/completions", {**CHAT, "stream": True}, tls=trusting(cert))
    assert status == 200 and body.endswith(b"data: [DONE]\n\n")
    assert one.ask("/health", unix=path)[0] == 200      # guarded by its permissions, not by TLS
    with pytest.raises(Exception):
        one.ask("/health")                      # plain HTTP
    old = trusting(cert)
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert one.ask("/health", tls=old)[0] == 200
    shutil.copy(new_cert, cert)                 # half of a renewal: the old one goes on
    one.reload()
    one.wait_log("no certificate with its key")
    shutil.copy(new_key, key)
    one.reload()
    assert one.ask("/health", tls=trusting(new_cert))[0] == 200
    assert one.end() == 0


# Reload and configuration


def test_reload_takes_what_it_can(start, tmp_path: Path) -> None:
    conf = tmp_path / "milad.conf"
    conf.write_text("keepalive = 5\nmax_tokens = 3\n")
    one = start("-c", str(conf))

    def finish() -> str:
        return json.loads(one.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "slow"}]})[1])["choices"][0]["finish_reason"]

    assert finish() == "length"
    conf.write_text('keepalive = 0.1\nprotocols = ["anthropic"]\nparallel = 2\nmax_tokens = 2\nlog_level = "debug"\n')
    one.reload()
    log = one.wait_log("reloaded: ")
    assert "parallel has changed: a restart takes it" in log and "keepalive" in log.rpartition("reloaded: ")[2]
    assert one.ask("/v1/chat/completions", CHAT)[0] == one.ask("/v1/responses", {"input": "x"})[0] == 404
    assert one.ask("/v1/messages", {**CHAT, "max_tokens": 9})[0] == one.ask("/v1/models")[0] == 200
    conf.write_text("keepalive = \n")
    one.reload()
    one.wait_log("the configuration stays as it is")
    conf.write_text("max_tokens = 1\n")
    one.reload()
    one.wait_log("protocols")
    assert finish() == "length"


def test_check_and_show(tmp_path: Path, default_model: Path, library: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MILA_TOKENIZER_PATH", "x")

    def milad(*args: str) -> tuple[int, str, str]:
        code = cli.main(["serve", *args])
        return (code, *capsys.readouterr())

    code, out, err = milad("-t", "--model", str(default_model))
    assert code == 0 and "is fine" in err and "MILA_TOKENIZER_PATH is ignored" in err and out == ""
    for args, word in ((("--model", "/x.bin"), "Mila's own format"), (("--model", "/nope.gguf"), "/nope.gguf"), (("--model", __file__), "not a GGUF file"),
                       (("--model", str(default_model), "--keys-file", "/nope"), "/nope"), (("--model", str(default_model), "--host", "::"), "--insecure"),
                       (("--model", "nobodys"), "smollm2")):
        code, out, err = milad("-t", *args)
        assert code == 1 and word in err and out == ""
    code, out, err = milad("-T", "--ctx", "99")
    assert code == 0 and "ctx = 99  # flag --ctx" in out and 'host = "127.0.0.1"  # default' in out and err.count("\n") == 1 and "MILA_TOKENIZER_PATH is ignored" in err


# The log


def test_the_log_file_is_rotated_and_prompts_stay_out_of_it(start, tmp_path: Path) -> None:
    log = tmp_path / "milad.log"
    one = start("--log-file", str(log), "--log-format", "json")
    one.ask("/v1/chat/completions", CHAT)
    one.ask("/v1/x\x1b[31m?key=sk-proj-abcdefghijklmnop".replace("\x1b", "%1b"), headers={"User-Agent": "\x1b]0;x\x07"})
    log.rename(tmp_path / "old.log")
    one.ask("/version")
    one.reload()
    one.ask("/props")
    one.wait_log("/props", log)
    old, new = (tmp_path / "old.log").read_text(), log.read_text()
    assert "/version" in old and "/version" not in new and "/props" not in old
    for line in (old + new).splitlines():
        assert set(json.loads(line)) == {"time", "level", "message"}
    assert "secret plan" not in old and "sk-proj-abcdef" not in old and "\x1b" not in old
    assert stat.S_IMODE(log.stat().st_mode) & 0o007 == 0


def test_prompts_are_logged_on_request_only(start) -> None:
    one = start("--log-prompts")
    one.ask("/v1/chat/completions", CHAT)
    assert "secret plan" in one.wait_log("body: ")


# Metrics

SAMPLE = re.compile(r'([a-z_:]+)(\{(?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)*\})? ([-+0-9.e]+)')


def read_metrics(text: str) -> dict[str, float]:
    """The exposition format, strictly: HELP and TYPE before a family's samples, no sample twice, finite values."""
    found: dict[str, float] = {}
    family = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            assert line.split()[2] != family
            family = line.split()[2]
        elif line.startswith("# TYPE "):
            assert line.split()[2] == family and line.split()[3] in ("counter", "gauge", "histogram")
        else:
            match = SAMPLE.fullmatch(line)
            assert match and match[1].startswith(family), line
            assert match[1] + (match[2] or "") not in found
            found[match[1] + (match[2] or "")] = float(match[3])
    return found


def test_metrics_and_status(start, capsys) -> None:
    one = start("--model-aliases", 'odd"name', script=[{"output": "one two three four", "when": {}, "token_delay_ms": 20}])
    before = read_metrics(one.ask("/metrics")[1].decode())
    for _ in range(3):
        assert one.ask("/v1/chat/completions", {**CHAT, "stream": True})[0] == 200
    assert one.ask("/v1/chat/completions", {"messages": 3})[0] == 400
    one.ask("/v1/wp-admin/xyz")
    after = read_metrics(one.ask("/metrics")[1].decode())
    assert after['milad_http_requests_total{route="/chat/completions",status="200"}'] == 3
    assert after['milad_http_requests_total{route="/chat/completions",status="400"}'] == 1
    assert after['milad_http_requests_total{route="other",status="404"}'] == 1 and not [k for k in after if "wp-admin" in k]
    assert after["milad_time_to_first_token_seconds_count"] - before["milad_time_to_first_token_seconds_count"] == 3
    assert after["milad_inter_token_seconds_count"] >= 3 and after["milad_generated_tokens_total"] >= 9
    buckets = [v for k, v in after.items() if k.startswith("milad_inter_token_seconds_bucket")]
    assert buckets == sorted(buckets) and buckets[-1] == after["milad_inter_token_seconds_count"]
    assert after['milad_prompt_tokens_total{source="computed"}'] > 0 and after["process_resident_memory_bytes"] > 1e6
    assert sum(v for k, v in after.items() if k.startswith("milad_kv_blocks{")) > 0
    status = json.loads(one.ask("/v1/milad/status")[1])
    assert status["state"] == "ready" and status["pid"] == one.process.pid and status["sequences"] == []
    assert cli.main(["top", "--once", "--url", f"127.0.0.1:{one.port}"]) == 0
    shown = capsys.readouterr().out
    assert f"pid {one.process.pid}" in shown and "smollm2" in shown
    assert cli.main(["top", "--url", "127.0.0.1:1"]) == 3 and "is a daemon running" in capsys.readouterr().err


def test_metrics_while_sequences_run(start) -> None:
    one = start()
    stream = service.connect(one.port)
    stream.request("POST", "/v1/chat/completions", json.dumps(SLOW_CHAT), {"Content-Type": "application/json"})
    stream.getresponse().read(10)
    status = json.loads(one.ask("/v1/milad/status")[1])
    (sequence,) = status["sequences"]
    assert sequence["state"] == "decode" and sequence["client"] == "127.0.0.1" and sequence["n_prompt"] > 0
    assert read_metrics(one.ask("/metrics")[1].decode())["milad_requests_running"] == 1
    from milad.cli import top
    assert any("decode" in line for line in top.render(status, None, 120))
    stream.close()
