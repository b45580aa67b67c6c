"""What scripts/init and scripts/install bring: linters, hardening, a life cycle by hand, an installation in a scratch root."""

from __future__ import annotations

import json
import os
import plistlib
import pwd
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import ROOT

INIT = ROOT / "scripts" / "init"
SHELL = {p: first for p in sorted([*ROOT.glob("scripts/*"), *INIT.iterdir(), *ROOT.glob("tests/init/*")]) if p.is_file() and b"python" not in (
    first := p.read_bytes().partition(b"\n")[0]) and first.startswith(b"#!")}      # path -> first line


def run(*command: object, timeout: float = 120, **options) -> subprocess.CompletedProcess:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=timeout, **options)


def unit(tmp_path: Path, name: str) -> Path:
    """The unit as installed, but for what this machine lacks."""
    text = (INIT / name).read_text().replace("@PREFIX@/bin/milad", "/bin/true")
    (tmp_path / name).write_text(re.sub(r"(?m)^Documentation=.*\n", "", text))
    return tmp_path / name


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze")
def test_the_unit_is_hardened_and_right(tmp_path: Path) -> None:
    done = run("systemd-analyze", "security", "--offline=true", "--no-pager", unit(tmp_path, "milad.service"))
    level = re.search(r"exposure level for milad.service: ([\d.]+)", done.stdout)
    assert level and float(level[1]) <= 2.0, done.stdout + done.stderr
    done = run("systemd-analyze", "verify", tmp_path / "milad.service", unit(tmp_path, "milad.socket"))
    assert done.returncode == 0 and done.stderr.strip() == ""


def test_each_hardening_line_says_what_it_stops() -> None:
    lines = (INIT / "milad.service").read_text().partition("what it stops")[2].partition("[Install]")[0].splitlines()
    said = False
    for line in lines[1:]:
        if line.startswith("#"):
            said = True
        elif not line:
            said = False
        else:
            assert said, line


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="no shellcheck")
@pytest.mark.parametrize("script", SHELL, ids=lambda p: p.name)
def test_shellcheck(script: Path) -> None:
    done = run("shellcheck", script)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SHELL, ids=lambda p: p.name)
def test_the_shell_reads_them(script: Path) -> None:
    done = run("bash" if b"bash" in SHELL[script] else "sh", "-n", script)
    assert done.returncode == 0 and done.stderr == ""


def test_the_plist() -> None:
    with open(INIT / "org.milad.plist", "rb") as f:
        found = plistlib.load(f)
    assert found["ProgramArguments"][:2] == ["@PREFIX@/bin/milad", "serve"] and found["Label"] == "org.milad"


def scratch(tmp_path: Path, model: Path, library: Path) -> dict[str, str]:
    """A root of its own for the scripts: program, configuration and settings that point into it."""
    program = tmp_path / "milad"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} MILAD_LIBRARY={library} exec {sys.executable} -m milad "$@"\n')
    program.chmod(0o755)
    (tmp_path / "script.jsonl").write_text(json.dumps({"output": "Hello.", "when": {}}) + "\n")
    (tmp_path / "milad.conf").write_text(f'model = "{model}"\nport = 0\nscript = "{tmp_path}/script.jsonl"\n')
    (tmp_path / "defaults").write_text("".join(f"{n}={v}\n" for n, v in {
        "BIN": program, "CONF": tmp_path / "milad.conf", "OWNER": pwd.getpwuid(os.getuid()).pw_name, "RUN": tmp_path / "run",
        "LOG": tmp_path / "log/milad.log", "LIB": tmp_path / "lib", "CACHE": tmp_path / "cache"}.items()))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MILA", "XDG", "HOME"))}
    return {**clean, "MILAD_DEFAULTS": str(tmp_path / "defaults")}


def test_the_sysv_script_by_hand(tmp_path: Path, default_model: Path, library: Path) -> None:
    env = scratch(tmp_path, default_model, library)

    def service(action: str) -> tuple[int, str]:
        """Its output goes to a file: a pipe would stay open with the daemon."""
        with open(tmp_path / "said", "w+") as out:
            code = subprocess.run(["sh", INIT / "milad.sysv", action], stdout=out, stderr=out, env=env, timeout=120).returncode
            out.seek(0)
            return code, out.read()

    def pid() -> int:
        return int((tmp_path / "run/milad.pid").read_text())

    try:
        assert service("status")[0] == 3 and service("reload")[0] == 7 and service("stop")[0] == 0 and service("nonsense")[0] == 2
        code, said = service("start")
        assert code == 0 and str(pid()) in said
        first = pid()
        assert service("start")[0] == 0 and pid() == first and service("status")[0] == 0
        log = tmp_path / "log/milad.log"
        assert service("reload")[0] == 0
        end = time.monotonic() + 20
        while "reloaded" not in log.read_text() and time.monotonic() < end:
            time.sleep(0.05)
        assert "reloaded" in log.read_text()
        assert service("restart")[0] == 0 and pid() != first
        os.kill(pid(), 9)
        end = time.monotonic() + 10
        while service("status")[0] == 0 and time.monotonic() < end:
            time.sleep(0.05)
        assert service("status")[0] == 1             # dead, but the file is there
        assert service("start")[0] == 0 and service("stop")[0] == 0 and service("status")[0] == 3
        (tmp_path / "milad.conf").write_text("prot = 1\n")
        code, said = service("start")
        assert code == 6 and "did you mean port" in said
    finally:
        if (tmp_path / "run/milad.pid").exists():
            os.kill(pid(), 9)


@pytest.fixture(scope="module")
def zipapp() -> Path:
    path = Path(os.environ.get("MILAD_TEST_ZIPAPP", ROOT / "dist" / "milad.pyz"))
    if not path.is_file():
        pytest.skip(f"no {path}: scripts/zipapp makes it")
    return path


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
@pytest.mark.parametrize("init,program", [("sysv", "su"), ("openrc", "supervise-daemon"), ("systemd", "/usr/lib/systemd/systemd")])
def test_installed_and_run_by_the_init_system(tmp_path: Path, zipapp: Path, tiny, init: str, program: str) -> None:
    """The whole life under the real thing, on a throw-away copy of this machine's root: tests/init/cycle."""
    for needed in (program, "unshare", "setpriv", "pivot_root", "ip", "curl", "logrotate", "useradd"):
        if not shutil.which(needed):
            pytest.skip(f"no {needed}")
    source = tmp_path / "source"
    for name in ("scripts", "man"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(zipapp, source / "milad.pyz")
    shutil.copy(tiny(), tmp_path / "tiny.gguf")
    for name in ("cycle", "boot"):
        shutil.copy(ROOT / "tests/init" / name, tmp_path)
    command = ["/srv/boot", "/srv/cycle", init] if init == "systemd" else ["/srv/cycle", init]
    done = run(ROOT / "tests/init/box", tmp_path, *command, timeout=600)
    if done.returncode == 77:
        pytest.skip(f"no box can be made here: {done.stderr.strip()[-200:]}")
    assert f"cycle: {init} is fine" in done.stdout, done.stdout + done.stderr


def test_installed_in_a_scratch_root(tmp_path: Path, zipapp: Path, default_model: Path) -> None:
    root = tmp_path / "root"
    done = run(ROOT / "scripts/install", "--root", root, "--prefix", "/opt/milad", "--init", "systemd", "--zipapp", zipapp)
    assert done.returncode == 0, done.stderr
    program = root / "opt/milad/bin/milad"
    manifest = (root / "opt/milad/share/milad/manifest").read_text().split()
    assert {"/opt/milad/bin/milad", "/etc/systemd/system/milad.service", "/opt/milad/share/man/man8/milad.8"} <= set(manifest)
    files = {"/" + str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}
    assert set(manifest) == files - {"/etc/milad/milad.conf"}
    assert "ExecStart=/opt/milad/bin/milad serve" in (root / "etc/systemd/system/milad.service").read_text()
    kept = root / "etc/milad/milad.conf"
    kept.write_text(kept.read_text() + "port = 8123\n")
    assert run(ROOT / "scripts/install", "--root", root, "--prefix", "/opt/milad", "--init", "none", "--zipapp", zipapp).returncode == 0
    assert "port = 8123" in kept.read_text()
    shown = run(program, "serve", "-T", "-c", kept, env={"PATH": "/usr/bin:/bin", "SHIV_ROOT": str(tmp_path / "shiv")})
    assert shown.returncode == 0 and "port = 8123" in shown.stdout and 'models_dir = "/var/lib/milad/models"' in shown.stdout
    assert run(ROOT / "scripts/uninstall", "--root", root, "--prefix", "/opt/milad").returncode == 0
    assert [p for p in root.rglob("*") if p.is_file()] == [kept]
    assert run(ROOT / "scripts/uninstall", "--root", root, "--prefix", "/opt/milad").returncode == 1


@pytest.mark.parametrize("init", ["systemd", "openrc", "sysv", "launchd"])
def test_installed_for_another_user(tmp_path: Path, zipapp: Path, init: str) -> None:
    """Every line that names the user names that one."""
    assert run(ROOT / "scripts/install", "--root", tmp_path, "--init", init, "--user", "somebody", "--zipapp", zipapp).returncode == 0
    named = [line.strip() for path in [*tmp_path.glob("etc/**/*"), *tmp_path.glob("Library/**/*")] if path.is_file()
             for line in path.read_text().splitlines() if re.match(r"\s*(\w*User|\w*Group|OWNER)=|.*MILAD_USER:=|.*<string>_?(milad|somebody)<|\s*(su|create \d+) \w+ \w+$", line)]
    assert len(named) == {"systemd": 6, "openrc": 3, "sysv": 3, "launchd": 3}[init] and all("somebody" in line for line in named), named


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv") or not shutil.which("openssl"),
                    reason="needs root, unshare, setpriv and openssl")
def test_a_service_user_without_home_on_a_read_only_root(tmp_path: Path, zipapp: Path, default_model: Path) -> None:
    """The installed program as nobody, everything read-only but its folders, no HOME: over TLS on a port and on a unix socket,
    with keys."""
    sys.path.insert(0, str(ROOT / "tests" / "e2e"))
    import service
    base = Path("/tmp") / f"milad-install-{os.getpid()}"        # pytest's folders are root's alone
    try:
        root = base / "root"
        assert run(ROOT / "scripts/install", "--root", root, "--prefix", "/opt/milad", "--init", "none", "--zipapp", zipapp).returncode == 0
        for folder in ("lib/milad/models", "cache/milad", "run"):
            (base / folder).mkdir(parents=True)
        shutil.copy(default_model, base / "lib/milad/models")
        cert, key = service.certificate(base, "cert")
        token = service.make_key(base / "keys", "someone")
        (base / "milad.conf").write_text(f'host = "127.0.0.1, unix:{base}/run/milad.sock"\nport = 0\ntls_cert = "{cert}"\ntls_key = "{key}"\n'
                                         f'keys_file = "{base}/keys"\nctx = 512\n')
        run("chown", "-R", "65534:65534", base)
        interpreter = (root / "opt/milad/bin/milad").read_bytes().split(b"\n")[0][2:].decode().strip()
        probe = run("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", interpreter, "-c", "0", cwd="/", env={"PATH": "/usr/bin:/bin"})
        if probe.returncode:
            pytest.skip(f"nobody can't run {interpreter}: {probe.stderr.strip()[-200:]}")
        inside = (f"mount --make-rprivate / && mount --bind {base} {base} && mount -o remount,bind,ro / && cd / && "
                  f"exec setpriv --reuid=65534 --regid=65534 --clear-groups --no-new-privs {root}/opt/milad/bin/milad serve -c {base}/milad.conf")
        with open(base / "stderr", "wb") as log:
            process = subprocess.Popen(["unshare", "--mount", "sh", "-c", inside], stderr=log, stdin=subprocess.DEVNULL, env={
                "PATH": "/usr/bin:/bin", "XDG_DATA_HOME": str(base / "lib"), "XDG_STATE_HOME": str(base / "lib"),
                "XDG_CACHE_HOME": str(base / "cache"), "SHIV_ROOT": str(base / "cache/milad/app")})
        try:
            end = time.monotonic() + 60
            while not (found := re.search(r" at https://127.0.0.1:(\d+)", (base / "stderr").read_text())):
                if process.poll() is not None and "mount:" in (base / "stderr").read_text():
                    pytest.skip("mounting is not allowed here")
                assert process.poll() is None and time.monotonic() < end, (base / "stderr").read_text()
                time.sleep(0.05)
            body, headers = {**service.CHAT, "max_tokens": 3}, {"Content-Type": "application/json", "x-api-key": token}
            for connection in (service.connect(int(found[1]), tls=service.trusting(cert)), service.connect(0, unix=f"{base}/run/milad.sock")):
                for sent, status in ((headers, 200), ({**headers, "x-api-key": "wrong"}, 401)):
                    connection.request("POST", "/v1/messages", json.dumps(body), sent)
                    reply = connection.getresponse()
                    assert reply.status == status, reply.read()
                    reply.read()
                connection.close()
            process.terminate()
            assert process.wait(20) == 0
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    finally:
        shutil.rmtree(base, ignore_errors=True)
