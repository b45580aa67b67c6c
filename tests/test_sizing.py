"""How the context and the arena follow from options and memory."""

import pytest

from milad import sizing
from milad.errors import UsageError

GB = 1 << 30


def choose(**given):
    return sizing.choose(**{"ctx": None, "parallel": 4, "kv_memory": None, "n_ctx_train": 8192, "bytes_per_token": 1 << 10,
                            "available": 16 * GB, **given})


def test_all_at_once_where_the_memory_allows():
    sizes = choose()
    assert sizes.n_ctx == 8192 and sizes.n_blocks >= 4 * 8192 // 32 and not sizes.notes


def test_the_context_shrinks_to_the_memory_and_says_so():
    sizes = choose(available=8 << 20)
    assert sizes.n_ctx < 8192 and sizes.n_ctx % 32 == 0 and "memory" in sizes.notes[0]
    assert sizes.n_blocks * 32 * 1024 <= 4 << 20 and sizes.n_blocks * 32 > sizes.n_ctx


def test_one_whole_request_always_fits_the_arena():
    for megabytes in range(1, 40):
        try:
            sizes = choose(kv_memory=megabytes << 20)
        except UsageError:
            continue
        assert sizes.n_blocks * 32 >= sizes.n_ctx + 1
        assert sizes.n_blocks * 32 << 10 <= max(megabytes << 20, (sizes.n_ctx + 64) << 10)


def test_a_context_that_was_asked_for_is_given_or_refused():
    assert choose(ctx=20000).n_ctx == 20000 and "trained" in choose(ctx=20000).notes[0]
    with pytest.raises(UsageError, match="--ctx 20000 needs .* a smaller --ctx"):
        choose(ctx=20000, kv_memory=1 << 20)


def test_the_scripted_core_has_no_memory_limit():
    assert choose(ctx=1 << 20, bytes_per_token=0, available=0).n_ctx == 1 << 20


@pytest.mark.parametrize("kv_type,n_bytes", [("f16", 384), ("bf16", 384), ("q8_0", 3 * (64 + 2 + 8))])
def test_bytes_of_a_token(kv_type, n_bytes):
    assert sizing.kv_token_bytes(3, 32, kv_type) == n_bytes
