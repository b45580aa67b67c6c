"""Runs a plan: writes its private files, then becomes the agent, so that terminal, signals and exit code are the agent's.

With a daemon of its own (start), this process stays as the parent: it leaves Ctrl-C to the agent, hands other signals on, and
ends the daemon with the agent.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Callable, Mapping

from ..errors import UsageError
from .base import Agent, Plan
from .target import Down, ask

START_S = 600.0                              # a large model on a slow disk
END_S = 10.0


def executable(agent: Agent, environment: Mapping[str, str]) -> str:
    """Where the agent's program is; UsageError says how to install it."""
    path = shutil.which(agent.program, path=environment.get("PATH"))
    if path is None:
        raise UsageError(f"{agent.title} is not installed (no {agent.program} in PATH): {agent.install}")
    return path


def write_files(plan: Plan) -> None:
    """The plan's private files: folders 0700, files 0600, each replaced at once so that two launches don't mix."""
    for path, text in plan.files.items():
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = path.with_name(f".{path.name}.{os.getpid()}")
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w", encoding="utf-8") as f:
                f.write(text)
            os.replace(part, path)
        except OSError as e:
            raise UsageError(f"{e.filename or path}: {e.strerror}") from e


def become(plan: Plan, path: str, environment: Mapping[str, str]) -> None:
    """execve; only returns by raising UsageError."""
    write_files(plan)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(path, plan.command, dict(environment))
    except OSError as e:
        raise UsageError(f"{path}: {e.strerror}") from e


def beside(plan: Plan, path: str, environment: Mapping[str, str], daemon: "subprocess.Popen[bytes]") -> int:
    """Runs the agent as a child while `daemon` serves it, then ends the daemon; the agent's exit code (128 + n: signal n)."""
    write_files(plan)
    try:
        child = subprocess.Popen([path, *plan.command[1:]], env=dict(environment))
    except OSError as e:
        raise UsageError(f"{path}: {e.strerror}") from e

    def hand_on(number: int, frame: object) -> None:
        if child.poll() is None:
            child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGQUIT):       # a terminal sends these to the agent, too
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, hand_on)
    code = child.wait()
    end(daemon)
    return 128 - code if code < 0 else code


# A daemon for the agent's life


def start(options: list[str], root: str, log: Path, say: Callable[[str], None]) -> "subprocess.Popen[bytes]":
    """`milad serve` with `options`, ready at `root`; UsageError with its last line where it ends instead. Its log goes to `log`.
    It gets a session of its own, so that a terminal's Ctrl-C is the agent's alone."""
    try:
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        out = open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
    except OSError as e:
        raise UsageError(f"{e.filename or log}: {e.strerror}") from e
    with out:
        daemon = subprocess.Popen([*_self(), "serve", *options], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                  start_new_session=True, preexec_fn=_end_with(os.getpid()))
    say(f"starting a daemon at {root} (its log: {log})")
    until = time.monotonic() + START_S
    try:
        while time.monotonic() < until:
            if daemon.poll() is not None:
                lines = log.read_text("utf-8", "replace").strip().splitlines() or ["no reason given"]
                raise UsageError("the daemon did not start: " + lines[-1].removeprefix("milad: "))
            try:
                if ask(root, "/health").status == 200:
                    return daemon
            except Down:
                pass
            time.sleep(0.05)
        raise UsageError(f"the daemon did not get ready in {START_S:.0f} s; see {log}")
    except BaseException:
        end(daemon)
        raise


def end(daemon: "subprocess.Popen[bytes]") -> None:
    if daemon.poll() is None:
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(END_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _self() -> list[str]:
    """The command that this program was started by: the zipapp, or the package."""
    own = sys.argv[0]
    if os.path.isfile(own) and zipfile.is_zipfile(own):
        return [sys.executable, os.path.abspath(own)]
    return [sys.executable, "-m", "milad"]


def _end_with(parent: int) -> Callable[[], None]:
    """For the child: SIGTERM when this process ends, however it ends (prctl(2), PR_SET_PDEATHSIG = 1)."""
    try:
        import ctypes
        prctl = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return lambda: None

    def ask_kernel() -> None:
        prctl(1, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

    return ask_kernel
