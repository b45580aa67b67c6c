"""The binding: what crosses it arrives as it was sent, and every mistake on either side is an exception with words."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from array import array
from pathlib import Path

import numpy as np
import pytest
import tiny as writer

import milad
from milad import capi
from milad.engine.base import Batch, Interrupted, SamplerArgs
from milad.errors import EngineFault, ModelError, UsageError

ROOT = Path(milad.__file__).resolve().parent.parent
N_VOCAB = writer.N_VOCAB

pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture(scope="module")
def model(library: Path, tiny):
    opened = capi.Model(tiny())
    yield opened
    opened.close()


@pytest.fixture
def context(model: capi.Model):
    opened = model.context(n_blocks=8, n_threads=1, max_rows=64)
    yield opened
    opened.close()


def prompt(tokens: list[int], blocks: list[int], sampler: SamplerArgs | None = None, start: int = 0) -> Batch:
    """One sequence; an output on its last row."""
    rows = array("i")
    for i, token in enumerate(tokens):
        rows.extend((token, start + i, 0, 0 if i == len(tokens) - 1 else -1))
    return Batch(rows, [array("i", blocks)], [sampler or SamplerArgs()])


def logits_of(context: capi.Context, batch: Batch) -> np.ndarray:
    out = array("f", bytes(4 * N_VOCAB * len(batch.samplers)))
    context.step(batch, out)
    return np.array(out).reshape(len(batch.samplers), N_VOCAB)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


# The library

def run_python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT,
                          env={**os.environ, **environment})


LOAD = "from milad import capi, errors\ntry: capi.library()\nexcept errors.UsageError as e: print(e)\n"


def test_version_is_the_packages() -> None:
    assert capi.version() == milad.__version__


def test_every_declared_function_is_there() -> None:
    header = (ROOT / "native" / "include" / "milad.h").read_text()
    names = re.findall(r"^MILAD_API[^;(]*?(\w+)\(", header, re.M)
    assert len(names) == len(set(names)) >= 20
    for name in names:
        assert getattr(capi.library(), name)


def test_missing_library_is_one_line(tmp_path: Path) -> None:
    done = run_python(LOAD, MILAD_LIBRARY=str(tmp_path / "absent.so"))
    assert done.stdout == f"can't load the core {tmp_path}/absent.so: it is missing (build native/, or set MILAD_LIBRARY)\n"


def test_library_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("no library")
    done = run_python(LOAD, MILAD_LIBRARY=str(tmp_path / "text.so"))
    assert done.stdout.count("\n") == 1 and "can't load the core" in done.stdout


def test_library_of_another_build_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "other.c"
    source.write_text("unsigned milad_struct_size(int which) { return which == 6 ? 12 : 8; }")
    try:
        subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", tmp_path / "other.so", source], check=True)
    except OSError:
        pytest.skip("no C compiler")
    done = run_python(LOAD, MILAD_LIBRARY=str(tmp_path / "other.so"))
    assert done.stdout.count("\n") == 1 and "does not fit this milad" in done.stdout


def test_needs_no_parser_at_run_time(library: Path) -> None:
    """The zipapp carries neither pycparser nor a compiler."""
    done = run_python("import sys\nsys.modules.update(dict.fromkeys(['pycparser', 'cffi', 'make_cffi']))\n"
                      "from milad import capi\nprint(capi.version())")
    assert done.stdout.strip() == milad.__version__, done.stderr


def test_devices_and_log() -> None:
    found = capi.devices()
    assert found["isa"] and found["threads"] >= 1
    assert all(level in "DIWE" for level, _ in capi.drain_log())
    assert capi.drain_log() == []


# The model

def test_model_arguments(tmp_path: Path, tiny) -> None:
    for path in ("", "nul\0inside"):
        with pytest.raises(ModelError):
            capi.Model(path)
    folder = tmp_path / "\u00e9\u00df \U0001f600"
    folder.mkdir()
    (folder / "m.gguf").write_bytes(tiny().read_bytes())
    model = capi.Model(folder / "m.gguf")
    assert model.info.n_vocab == N_VOCAB and model.path == str(folder / "m.gguf")
    model.close()
    model.close()
    with pytest.raises(EngineFault):
        model.tokenize("closed")
    with pytest.raises(EngineFault):
        model.metadata()


def test_progress_ends_at_one(tiny) -> None:
    shares: list[float] = []
    capi.Model(tiny(), progress=shares.append).close()
    assert shares[-1] == 1 and shares == sorted(shares) and all(0 <= s <= 1 for s in shares)
    with pytest.raises(ModelError):
        capi.Model("/nonexistent", progress=shares.append)


def test_tokens_spell_the_text(model: capi.Model) -> None:
    random = np.random.default_rng(0)
    texts = ["", "hello world", "\r\n\t 12", "\x00\x01", "\U0001f469\u200d\U0001f469", "x" * 5000]
    texts += ["".join(map(chr, random.integers(32, 0x3000, 40))) for _ in range(50)]
    for text in texts:
        tokens = model.tokenize(text)
        assert b"".join(map(model.token_bytes, tokens)) == text.encode()
        assert model.tokenize(text.encode()) == tokens


def test_surrogates(model: capi.Model) -> None:
    """As JSON can bring them: a pair is its character, a lone one U+FFFD."""
    assert model.tokenize("\ud83d\ude00") == model.tokenize("\U0001f600")
    assert model.tokenize("a\ud83db") == model.tokenize("a\ufffdb")
    assert model.tokenize(b"a\xffb") == model.tokenize("a\ufffdb")


def test_specials(model: capi.Model) -> None:
    assert model.specials == {name: i for i, name in enumerate(writer.SPECIALS + writer.ADDED)}
    assert [model.is_control(i) for i in range(8)] == [True] * 3 + [False] * 5
    assert 2 in model.eog and 20 not in model.eog
    assert model.tokenize("<|im_end|>", parse_special=True) == [2]
    assert not {0, 1, 2} & set(model.tokenize("<|im_end|><|im_start|>"))
    assert model.token_bytes(1) == b"<|im_start|>"
    for token in (-1, N_VOCAB, 2**31 - 1):
        with pytest.raises(ValueError):
            model.token_bytes(token)


# Steps

def test_logprobs_are_those_of_the_logits(context: capi.Context) -> None:
    tokens = [7, 90, 100, 110]
    logits = logits_of(context, prompt(tokens, [0]))[0]
    lp = log_softmax(logits)
    output = context.step(prompt(tokens, [0], SamplerArgs(n_top=20)))[0]
    best = np.argsort(-lp, kind="stable")[:20]
    assert output.token == best[0] and [t for t, _ in output.top] == list(best)
    assert np.allclose([p for _, p in output.top], lp[best], rtol=0, atol=1e-4)
    assert abs(output.logprob - lp[best[0]]) <= 1e-4
    assert context.step(prompt(tokens, [0], SamplerArgs(n_top=0)))[0].top == ()


def test_sampler_fields_arrive(context: capi.Context) -> None:
    """Each field of a sampler moves the outcome as it should: none is lost or swapped on the way."""
    tokens = [7, 90, 100]
    logits = logits_of(context, prompt(tokens, [0]))[0]
    order = np.argsort(-logits)

    def pick(**fields: object) -> object:
        return context.step(prompt(tokens, [0], SamplerArgs(**fields)))[0]

    assert pick().token == order[0]
    assert pick(forced=5).token == 5 and abs(pick(forced=5, n_top=0).logprob - log_softmax(logits)[5]) <= 1e-4
    assert pick(bias_ids=array("i", [9, 8]), bias=array("f", [50.0, 100.0])).token == 8
    mask = bytearray((N_VOCAB + 31) // 32 * 4)
    for token in (int(order[3]), int(order[5])):
        mask[token // 8] |= 1 << token % 8
    assert pick(mask=bytes(mask)).token == order[3]
    assert pick(mask=bytes(len(mask))).token == -1
    history = array("i", [*tokens, int(order[0])])
    assert pick(repeat_penalty=1e6, history=history, n_prompt=3).token != order[0]
    assert pick(presence_penalty=100.0, history=history, n_prompt=3).token != order[0]
    assert pick(presence_penalty=100.0, history=history, n_prompt=4).token == order[0]
    assert pick(frequency_penalty=100.0, history=history, n_prompt=3).token != order[0]
    assert pick(temperature=50.0, top_k=1).token == order[0]
    assert pick(temperature=50.0, top_p=1e-6).token == order[0]
    assert pick(temperature=1.0, min_p=1.0).token == order[0]
    draws = {pick(temperature=50.0, seed=seed).token for seed in range(40)}
    assert len(draws) > 10
    assert pick(temperature=50.0, seed=2**64 - 1).token == pick(temperature=50.0, seed=-1).token


def test_many_outputs_keep_their_order(context: capi.Context) -> None:
    """Twenty sequences at once give, each in its place, what they give alone (and to the bit)."""
    opened = context._model.context(n_blocks=20, n_threads=1, max_rows=64)
    firsts = [10 + 3 * i for i in range(20)]
    alone = [logits_of(opened, prompt([token, 30], [i]))[0] for i, token in enumerate(firsts)]
    rows = array("i")
    for i, token in enumerate(firsts):
        rows.extend((token, 0, i, -1, 30, 1, i, 19 - i))
    samplers = [SamplerArgs(n_top=i) for i in range(20)]
    batch = Batch(rows, [array("i", [i]) for i in range(20)], samplers)
    logits = array("f", bytes(4 * 20 * N_VOCAB))
    outputs = opened.step(batch, logits)
    together = np.array(logits).reshape(20, N_VOCAB)
    for i in range(20):
        assert np.array_equal(together[19 - i], alone[i])
        assert outputs[i].token == int(np.argmax(together[i])) and len(outputs[i].top) == i
    opened.close()


BAD_BATCHES: list[Batch] = [
    prompt([N_VOCAB], [0]), prompt([-1], [0]), prompt([7], []), prompt([7], [8]), prompt([7], [-1]), prompt([7] * 33, [0]),
    prompt([7] * 65, [0, 1, 2]), prompt([7], [0], start=32), prompt([7], [0], start=-1), prompt([], [0]),
    Batch(array("i", [7, 0, 1, 0]), [array("i", [0])], [SamplerArgs()]),
    Batch(array("i", [7, 0, 0, 1]), [array("i", [0])], [SamplerArgs()]),
    Batch(array("i", [7, 0, 0, -1]), [array("i", [0])], [SamplerArgs()]),
    Batch(array("i", [7, 0, 0, 0, 7, 2, 0, -1]), [array("i", [0])], [SamplerArgs()]),
    Batch(array("i", [7, 0, 0, 0, 7, 0, 1, 1]), [array("i", [0]), array("i", [0])], [SamplerArgs(), SamplerArgs()]),
    prompt([7], [0], SamplerArgs(n_top=21)), prompt([7], [0], SamplerArgs(temperature=float("nan"))),
    prompt([7], [0], SamplerArgs(forced=N_VOCAB)),
    prompt([7], [0], SamplerArgs(bias_ids=array("i", [N_VOCAB]), bias=array("f", [1]))),
    prompt([7], [0], SamplerArgs(history=array("i", [-7]), repeat_penalty=2.0, n_prompt=0)),
]


@pytest.mark.parametrize("number", range(len(BAD_BATCHES)))
def test_bad_batches_are_refused_whole(number: int, context: capi.Context) -> None:
    before = logits_of(context, prompt([7, 8], [0]))
    with pytest.raises(EngineFault) as caught:
        context.step(BAD_BATCHES[number])
    assert str(caught.value) and "\n" not in str(caught.value)
    assert np.array_equal(logits_of(context, prompt([7, 8], [0])), before)


def test_ill_formed_arguments(context: capi.Context) -> None:
    for batch in (Batch(array("i", [1, 2, 3]), [], []), Batch(array("q", [7, 0, 0, 0]), [array("i", [0])], [SamplerArgs()]),
                  Batch(array("i", [7, 0, 0, 0]), [array("q", [0])], [SamplerArgs()]),
                  prompt([7], [0], SamplerArgs(mask=b"\xff")), prompt([7], [0], SamplerArgs(top_k=2**40)),
                  prompt([7], [0], SamplerArgs(bias_ids=array("i", [1]), bias=array("f"))),
                  prompt([7], [0], SamplerArgs(history=array("h", [1])))):
        with pytest.raises(ValueError):
            context.step(batch)
    with pytest.raises(ValueError):
        context.step(prompt([7], [0]), array("f", [0.0]))


@pytest.mark.parametrize("seed", range(2))
def test_random_batches_never_crash(seed: int, model: capi.Model) -> None:
    """Numbers in and around their ranges: a step or a refusal, and the context works on."""
    random = np.random.default_rng(seed)
    context = model.context(n_blocks=4, n_threads=1, max_rows=16)
    done = 0
    for _ in range(1500):
        def near(n: int) -> int:
            return int(random.integers(-1, n + 1)) if random.random() < 0.02 else int(random.integers(0, max(n, 1)))

        n_sequences, n_outputs = int(random.integers(1, 4)), int(random.integers(0, 3))
        free = list(random.permutation(4))
        tables = [array("i", [int(free.pop()) if random.random() < 0.97 else near(4)]) for _ in range(n_sequences)]
        rows, outputs = array("i"), list(range(n_outputs))
        for sequence in range(n_sequences):
            start = near(30)
            for k in range(int(random.integers(0, 5))):
                rows.extend((near(N_VOCAB), start + k, sequence, outputs.pop() if outputs else -1))
        samplers = [SamplerArgs(temperature=float(random.choice([0, 1, -1])), top_k=near(5), n_top=near(20) - 1,
                                seed=int(random.integers(2**63))) for _ in range(n_outputs)]
        try:
            found = context.step(Batch(rows, tables, samplers))
        except EngineFault:
            continue
        done += 1
        assert all(-1 <= o.token < N_VOCAB for o in found)
    assert done > 50
    context.close()


def test_interrupt_crosses_threads(context: capi.Context) -> None:
    long = prompt([7] * 64, [0, 1])
    context.interrupt()
    with pytest.raises(Interrupted):
        context.step(long)
    want = logits_of(context, long)
    stop, seen = threading.Event(), 0

    def pester() -> None:
        while not stop.is_set():
            context.interrupt()

    thread = threading.Thread(target=pester)
    thread.start()
    try:
        for _ in range(200):
            try:
                context.step(long)
            except Interrupted:
                seen += 1
    finally:
        stop.set()
        thread.join()
    assert seen > 0
    try:
        context.step(long)
    except Interrupted:
        pass
    assert np.array_equal(logits_of(context, long), want)


# The cache

def test_blocks_move(context: capi.Context) -> None:
    """A block copied inside, or read and written back elsewhere, continues as the original does."""
    tokens = [7 + i % 200 for i in range(32)]
    want = logits_of(context, prompt(tokens + [50], [0, 1]))
    context.kv_copy(0, 2, 32)
    assert np.array_equal(logits_of(context, prompt([50], [2, 3], start=32)), want)
    data = context.kv_read(0)
    assert len(data) == context.block_bytes and data == context.kv_read(2)
    context.kv_write(5, data)
    assert np.array_equal(logits_of(context, prompt([50], [5, 6], start=32)), want)
    context.kv_copy(0, 4, 10)
    assert np.array_equal(logits_of(context, prompt(tokens[10:] + [50], [4, 7], start=10)), want)
    for call in (lambda: context.kv_copy(0, 8, 1), lambda: context.kv_copy(-1, 0, 1), lambda: context.kv_copy(0, 1, 33),
                 lambda: context.kv_read(8), lambda: context.kv_write(0, data[:-1]), lambda: context.kv_write(-1, data)):
        with pytest.raises(EngineFault):
            call()


def test_context_arguments(model: capi.Model) -> None:
    for arguments in ({"n_blocks": 0}, {"n_blocks": -1}, {"n_blocks": 2**31}, {"n_blocks": 1, "max_rows": 0},
                      {"n_blocks": 1, "max_rows": 4097}, {"n_blocks": 1, "kv_type": "f64"}, {"n_blocks": 1, "n_threads": -1}):
        with pytest.raises(UsageError):
            model.context(**arguments)


def test_stat(context: capi.Context) -> None:
    context.step(prompt([7, 8, 9], [0]))
    stat = context.stat()
    assert (stat["n_blocks"], stat["max_rows"], stat["n_threads"]) == (8, 64, 1)
    assert (stat["n_steps"], stat["n_rows"]) == (1, 3)
    assert stat["kv_bytes"] >= 8 * stat["kv_block_bytes"] > 0 and stat["isa"]
    assert context.begin(tools=False, path="/", last="") is None


def test_closing(tiny) -> None:
    model = capi.Model(tiny())
    first, second = model.context(n_blocks=2), model.context(n_blocks=2)
    first.close()
    first.close()
    first.interrupt()
    model.close()
    for call in (first.stat, second.stat, lambda: second.kv_read(0), lambda: second.step(prompt([7], [0]))):
        with pytest.raises(EngineFault):
            call()
