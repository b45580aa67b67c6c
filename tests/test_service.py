"""sd_notify, inherited sockets, pid files and who may be listened to, without a daemon."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from conftest import ROOT
from milad import access, service
from milad.errors import UsageError


def test_notify_on_paths_and_abstract_names(tmp_path, monkeypatch):
    for address, bound in ((str(tmp_path / "s"), str(tmp_path / "s")), (f"@milad-{os.getpid()}", f"\0milad-{os.getpid()}")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.bind(bound)
            sock.settimeout(5)
            monkeypatch.setenv("NOTIFY_SOCKET", address)
            notify = service.Notify()
            assert "NOTIFY_SOCKET" not in os.environ
            notify("READY=1", "STATUS=x")
            assert sock.recv(100) == b"READY=1\nSTATUS=x"
            for share in (0.1, 0.2, 0.3):       # once a second at most
                notify.loading("m", share)
            assert sock.recv(100).startswith(b"STATUS=loading m: 10%\nEXTEND_TIMEOUT_USEC=")
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                sock.recv(100)
    service.Notify()("READY=1")                 # nobody listens: nothing happens


@pytest.mark.parametrize("usec,pid,wanted", [("2000000", None, 1.0), ("0", None, 0), ("x", None, 0), ("-5", None, 0), ("2000000", "1", 0), ("", None, 0)])
def test_watchdog(monkeypatch, usec, pid, wanted):
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    if pid:
        monkeypatch.setenv("WATCHDOG_PID", pid)
    assert service.watchdog_s() == wanted


def inherited(setup: str, env: dict[str, str]) -> str:
    program = f"import os, socket, sys; sys.path.insert(0, {str(ROOT)!r}); os.closerange(3, 10)\n{setup}\n" + """
os.environ["LISTEN_PID"] = os.environ.get("LISTEN_PID") or str(os.getpid())
from milad import service
from milad.errors import UsageError
try:
    print([s.getsockname()[1] > 0 for s in service.inherited_sockets()], [n for n in os.environ if n.startswith("LISTEN")])
except UsageError as e:
    print(e)
"""
    return subprocess.run([sys.executable, "-c", program], env={**os.environ, **env}, capture_output=True, text=True).stdout.strip()


def test_inherited_sockets():
    listening = "s = socket.create_server(('127.0.0.1', 0)); os.dup2(s.fileno(), 5); s.close(); os.dup2(5, 3); os.close(5)"
    assert inherited(listening, {"LISTEN_FDS": "1"}) == "[True] []"
    assert inherited(listening, {"LISTEN_FDS": "1", "LISTEN_PID": "1"}) == "[] []"
    assert inherited("", {"LISTEN_FDS": "1", "LISTEN_FDNAMES": "web"}) == "the service manager's socket web can't be used: Bad file descriptor"
    assert "can't be used" in inherited("os.dup2(0, 3)", {"LISTEN_FDS": "1"}) and "descriptor 3" in inherited("", {"LISTEN_FDS": "1"})
    datagram = listening.replace("socket.create_server(('127.0.0.1', 0))", "socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('127.0.0.1', 0))")
    assert "no listening stream socket" in inherited(datagram, {"LISTEN_FDS": "1"})
    assert inherited("", {"LISTEN_FDS": "many"}) == "[] []"


def test_pid_files(tmp_path):
    path = str(tmp_path / "pid")
    one = service.PidFile(path)
    assert open(path).read() == f"{os.getpid()}\n"
    with pytest.raises(UsageError, match=str(os.getpid())):
        service.PidFile(path)
    one.close()
    assert not os.path.exists(path)
    with open(path, "w") as f:
        f.write("a much longer content than a pid\n" * 3)
    two = service.PidFile(path)
    assert open(path).read() == f"{os.getpid()}\n"
    two.close()
    os.symlink(tmp_path / "elsewhere", path)    # a link planted in a shared folder is not followed
    with pytest.raises(UsageError):
        service.PidFile(path)
    assert not (tmp_path / "elsewhere").exists()


def value(**more):
    return {"keys_file": None, "insecure_no_key": False, **more}


@pytest.mark.parametrize("address,local", [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True), ("localhost", True), ("unix:/x", True),
                                           ("", False), ("*", False), ("0.0.0.0", False), ("::", False), ("192.0.2.1", False), ("no.invalid", False),
                                           ("2130706433", True), ("0", False)])
def test_who_is_reached_from_outside(address, local):
    assert access.is_local(address) == local
    if local:
        access.check_exposed(address, value())
    else:
        with pytest.raises(UsageError, match="keys_file"):
            access.check_exposed(address, value())
    access.check_exposed(address, value(keys_file="x"))
    access.check_exposed(address, value(insecure_no_key=True))


def test_groups():
    import grp
    first = grp.getgrall()[0]
    assert access.check_group(first.gr_name) == first.gr_gid and access.check_group("123") == 123
    with pytest.raises(UsageError, match="no group"):
        access.check_group("no such group")
