"""The aarch64 kernels, cross-built and run under qemu: which are chosen where, and products with the bits of this machine's.

The C tests take minutes under emulation: scripts/check-neon runs them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ["aarch64-linux-gnu-gcc", "qemu-aarch64"]


def test_products_equal_this_machines(library: Path) -> None:
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)}: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user")
    host = library.parent / "tool_products"
    if not host.is_file():
        pytest.skip(f"no {host}: configure native/ with -DMILAD_TESTS=ON")
    done = subprocess.run([ROOT / "scripts" / "check-neon", "--quick"], env={**os.environ, "MILAD_HOST_PRODUCTS": str(host)},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    first = (ROOT / "build" / "neon" / "products-host").read_text().split("\n", 1)[0]
    if first == "avx2":
        assert done.stdout.splitlines() == [f"{isa}: products equal those of avx2, bit by bit"
                                            for isa in ("neon-dotprod on max", "neon on max", "neon on cortex-a53")]
