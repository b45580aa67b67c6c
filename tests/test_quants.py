"""Every weight type's dequantisation equals the gguf package's, bit for bit, on random blocks and by way of packed panels."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
gguf = pytest.importorskip("gguf")

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"]
# Where a block keeps its F16 scales (ggml-common.h), so that random ones can be finite.
SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "IQ4_NL": [0], "Q2_K": [80, 82], "Q3_K": [108],
          "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


@pytest.fixture(scope="session")
def dequantise(library: Path) -> Path:
    tool = library.parent / "tool_dequantise"
    if not tool.is_file():
        pytest.skip(f"no {tool}: configure native/ with -DMILAD_TESTS=ON")
    return tool


def blocks(name: str, n_values: int, seed: int) -> bytes:
    """Random bytes with finite scales, subnormal, negative and zero ones among them."""
    random = np.random.default_rng(seed)
    n_block, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    if n_block == 1:
        values = (random.standard_normal(n_values) * np.exp(random.uniform(-20, 5, n_values))).astype(np.float32)
        values[:3] = [0.0, -0.0, 1e-7]
        if name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        return values.astype(np.float16 if name == "F16" else np.float32).tobytes()
    raw = random.integers(0, 256, (n_values // n_block, n_bytes), dtype=np.uint8)
    for at in SCALES[name]:
        scale = (random.standard_normal(len(raw)) * np.exp(random.uniform(-12, 3, len(raw)))).astype(np.float16)
        scale[:3] = [0.0, -1.5, 6e-8]
        raw[:, at:at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return raw.tobytes()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", TYPES)
def test_equals_gguf_package(dequantise: Path, name: str, seed: int) -> None:
    kind, n_values = gguf.GGMLQuantizationType[name], 64 * 256
    raw = blocks(name, n_values, seed)
    done = subprocess.run([str(dequantise), str(int(kind)), str(n_values)], input=raw, capture_output=True, check=True)
    straight, packed = np.frombuffer(done.stdout, dtype=np.float32).reshape(2, n_values)
    want = gguf.quants.dequantize(np.frombuffer(raw, dtype=np.uint8), kind).reshape(-1).astype(np.float32)
    assert np.isfinite(want).all() and np.abs(want).max() > 0
    assert (straight == want).all()
    assert (packed == want).all()


def test_refuses_what_is_no_type(dequantise: Path) -> None:
    assert subprocess.run([str(dequantise), "4", "32"], input=b"", capture_output=True).returncode == 2
