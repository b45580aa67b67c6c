"""A deterministic core for tests: what follows a row depends on every token and position that its sequence's blocks hold, so
that a block shared, copied or freed wrongly changes the text. `naive` is the same model, one request at a time, no blocks.
"""

from __future__ import annotations

import random
import zlib
from array import array
from typing import Any, Sequence as Seq

from milad.engine.base import BLOCK, Batch, Interrupted, Output, SamplerArgs
from milad.errors import EngineFault

N_VOCAB = 60
EOS = 1


def following(tokens: Seq[int], sampler: SamplerArgs) -> int:
    """The model: mostly repeats what stood `period` tokens ago (so that n-gram drafts often hit), else a hash of it all."""
    data = array("i", tokens).tobytes()
    h = zlib.crc32(data, sampler.seed & 0xFFFFFFFF)
    if sampler.repeat_penalty != 1.0:
        h = zlib.crc32(sampler.history.tobytes() if sampler.history is not None else data, h)
    if h % 29 == 0:
        return EOS
    period = 3 + sampler.seed % 5
    if h % 5 and len(tokens) >= period:
        return tokens[-period] if tokens[-period] != EOS else 2
    return 2 + (h >> 8) % (N_VOCAB - 2)


def naive(tokens: list[int], max_tokens: int, n_ctx: int, sampler: SamplerArgs, stop_ids: frozenset[int] = frozenset({EOS})
          ) -> tuple[list[int], str, int]:
    """(delivered tokens, reason, n_output)."""
    tokens = list(tokens)
    out: list[int] = []
    n = 0
    while True:
        token = following(tokens, sampler)
        tokens.append(token)
        n += 1
        if token in stop_ids:
            return out, "stop", n
        out.append(token)
        if n >= max_tokens:
            return out, "length", n
        if len(tokens) >= n_ctx:
            return out, "context", n


class Info:
    fingerprint = 0xFEED
    n_vocab = N_VOCAB


class FakeModel:
    info = Info()
    path = "fake.gguf"
    eog = frozenset({EOS})
    specials: dict[str, int] = {}

    def token_bytes(self, token: int) -> bytes:
        return b"%d " % token

    def is_control(self, token: int) -> bool:
        return token <= EOS


class FakeContext:
    """base.Context. Blocks hold (token, position) per slot; every rule of milad_step that the scheduler must keep is checked."""

    def __init__(self, n_blocks: int, max_rows: int = 64) -> None:
        self.n_blocks = n_blocks
        self.max_rows = max_rows
        self.block_bytes = BLOCK * 8
        self.layout = "fake"
        self.kv: list[list[Any]] = [[None] * BLOCK for _ in range(n_blocks)]
        self.n_rows = self.n_steps = self.n_copied = 0
        self.fault_rate = self.interrupt_rate = self.write_fault_rate = 0.0
        self.random = random.Random(0)
        self.interrupted = False
        self.n_ctx = 1 << 30            # of the requests: no row may stand beyond

    def step(self, batch: Batch) -> list[Output]:
        rows = [tuple(batch.rows[i:i + 4]) for i in range(0, len(batch.rows), 4)]
        assert 1 <= len(rows) <= self.max_rows
        owners: dict[int, int] = {}
        for table in batch.tables:
            assert len(set(table)) == len(table)
            for block in table:
                assert 0 <= block < self.n_blocks
                owners[block] = owners.get(block, 0) + 1
        fails = self.random.random() < self.fault_rate
        breaks = self.random.random() < self.interrupt_rate or self.interrupted
        self.interrupted = False
        last: dict[int, int] = {}
        seen: list[int] = []
        for token, position, sequence, output in rows:
            assert position == last.get(sequence, position - 1) + 1, "a gap between rows"
            assert sequence in last or sequence not in seen, "rows of one sequence stand together"
            last[sequence] = position
            assert position < self.n_ctx
            seen.append(sequence)
            block = batch.tables[sequence][position // BLOCK]
            assert owners[block] == 1, "a row writes a shared block"
            self.kv[block][position % BLOCK] = "undefined" if fails or breaks else (token, position)
        if fails:
            raise EngineFault("a fault for the test")
        if breaks:
            raise Interrupted
        self.n_rows += len(rows)
        self.n_steps += 1
        outputs: dict[int, Output] = {}
        for token, position, sequence, output in rows:
            if output < 0:
                continue
            table = batch.tables[sequence]
            tokens = []
            for at in range(position + 1):
                held, where = self.kv[table[at // BLOCK]][at % BLOCK]
                assert where == at, "a block read at a wrong position"
                tokens.append(held)
            sampler = batch.samplers[output]
            if sampler.history is not None:
                assert len(sampler.history) == position + 1
            assert output not in outputs
            picked = sampler.forced if sampler.forced >= 0 else following(tokens, sampler)
            while sampler.mask is not None and not sampler.mask[picked // 8] >> picked % 8 & 1:
                picked = (picked + 1) % N_VOCAB
            outputs[output] = Output(picked, -1.0 - picked / 100 if sampler.n_top >= 0 else 0.0)
        assert sorted(outputs) == list(range(len(batch.samplers)))
        return [outputs[i] for i in range(len(outputs))]

    def kv_copy(self, src: int, dst: int, n_tokens: int) -> None:
        assert src != dst and 0 < n_tokens <= BLOCK
        self.kv[dst][:] = self.kv[src][:n_tokens] + ["undefined"] * (BLOCK - n_tokens)
        self.n_copied += 1

    def kv_read(self, block: int) -> bytes:
        return array("i", [x for slot in self.kv[block] for x in slot]).tobytes()

    def kv_write(self, block: int, data: bytes) -> None:
        assert len(data) == self.block_bytes
        if self.random.random() < self.write_fault_rate:
            self.kv[block][:] = ["undefined"] * BLOCK
            raise EngineFault("a fault for the test")
        flat = array("i", bytes(data))
        self.kv[block][:] = [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]

    def interrupt(self) -> None:
        self.interrupted = True

    def stat(self) -> dict[str, Any]:
        return {}

    def begin(self, *, tools: bool, path: str, last: str) -> Any:
        return None

    def close(self) -> None:
        pass
