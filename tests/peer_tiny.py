"""Log-probabilities that llama.cpp computes for tiny models: an outside oracle of every architecture and RoPE scaling.

As a program it makes tests/data/peer_tiny.json anew: python tests/peer_tiny.py LLAMA_SERVER [COMMENT]. Its cases are tests/tiny.py's
options; the models themselves are written again by the test, from the same seeds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).resolve().parent / "data" / "peer_tiny.json"
N_TOKENS = 300  # beyond the first 128 positions, which the models' scalings count from
CASES: list[dict[str, Any]] = [
    {}, {"rope": "linear"}, {"rope": "yarn"}, {"rope": "freqs"}, {"weight_type": "F16", "bias": True},
    {"weight_type": "BF16", "tied": False, "rope_base": 500000.0}, {"weight_type": "Q8_0"}, {"weight_type": "Q4_1", "embd_type": "Q8_0"},
    {"weight_type": "Q4_0", "n_head_kv": 4}, {"weight_type": "Q5_1", "n_head_kv": 1},
    {"weight_type": "Q6_K", "n_embd": 256, "n_ff": 512}, {"weight_type": "Q4_K", "n_embd": 256, "n_ff": 512},
    {"arch": "qwen2", "tied": False}, {"arch": "qwen2", "rope": "yarn"}, {"arch": "qwen3", "head_dim": 32, "rope": "linear"},
    {"arch": "qwen3", "weight_type": "BF16", "n_head_kv": 1, "rope": "yarn",
     "extra": {"qwen3.rope.scaling.yarn_beta_fast": 16.0, "qwen3.rope.scaling.attn_factor": 1.25}},
    # every type at widths that the K types' blocks of 256 divide: one block a row, and two
    *({"weight_type": kind, "n_embd": width, "n_ff": 512} for width in (256, 512) for kind in
      ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
      if (kind, width) not in (("Q6_K", 256), ("Q4_K", 256))),
]


def tokens(seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(7, 280, N_TOKENS)]


def _ask(server: str, model: str, prompt: list[int], port: int) -> list[list[float]] | None:
    """The 20 best (id, logprob) after `prompt`; None where the server shows none (a token that is half a character)."""
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([server, "-m", model, "--port", str(port), "-c", "512", "-t", "1", "--no-warmup", "-fa", "off",
                                "--cache-type-k", "f32", "--cache-type-v", "f32"], stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            time.sleep(0.1)
            try:
                urllib.request.urlopen(url + "/health")
                break
            except OSError:
                if process.poll() is not None:
                    raise SystemExit(f"{server} can't load the model") from None
        body = {"prompt": prompt, "n_predict": 1, "n_probs": 20, "temperature": 0, "cache_prompt": False}
        request = urllib.request.Request(url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
        answer = json.load(urllib.request.urlopen(request))
        found = answer.get("completion_probabilities")
        return [[t["id"], round(t["logprob"], 6)] for t in found[0]["top_logprobs"]] if found else None
    finally:
        process.kill()
        process.wait()


def make(server: str, comment: str) -> None:
    import tiny

    cases = []
    for number, options in enumerate(CASES):
        for seed in range(100 * number, 100 * number + 20):
            with tempfile.TemporaryDirectory() as folder:
                tiny.write(folder + "/m.gguf", seed=seed, **options)
                top = _ask(server, folder + "/m.gguf", tokens(seed), 18100 + number)
            if top:
                cases.append({"options": options, "seed": seed, "top": top})
                print(options, seed, top[:2], file=sys.stderr)
                break
    lines = ",\n".join(json.dumps(c) for c in cases)
    DATA.write_text(f'{{"source": {json.dumps(comment)}, "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    make(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "llama.cpp, llama-server")
