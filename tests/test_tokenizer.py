"""The tokenizer against Hugging Face `tokenizers` and llama.cpp's expected ids, and against hostile vocabularies."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path
from typing import Any, Callable, Iterator

import gguf
import pytest
import tokenizer_oracle as oracle

from milad import capi
from milad.errors import ModelError

DATA = Path(__file__).resolve().parent / "data"
MODELS = ["smollm", "gpt-2", "llama-bpe", "qwen2"]
RULES = ["gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35", "tekken"]

AWKWARD = [
    "", " ", "  ", "\n", "\r\n\t", " \r\n \t x", "a  b", "a   ", "   a", "\t\tx", "x \n\n  y\n", "1234567 12 1", "٣٤٥ ½ Ⅷ 10³",
    "I'm I'M you'LL 'Tis 's 'S '\u017f '\u017fx we'Ve 'rE 're'x don\u2019t", "''s '' 's's", "e\u0301a\u0323\u0302 \u0301 \u0301x \u0301A\u0301",
    "👩\u200d👩\u200d👧\u200d👦 🏳\ufe0f\u200d🌈 👍🏽", "漢字かなカナ한국어 \uac01\u11a8", "\u1100\u1161\u11a8", "a\u0085b \u0085 \u00a0x\u00a0\u00a0y \u3000z\u200b",
    "\u0378\ue000\U000e0001\U0010ffff", "ǅ ǅA aǅ ABCdef abcDEF ABC ʰA Aʰ Aʰb ªB", "!!!\r\n//\n/x", "...\n\n a", "\x00\x01 \x1c\x1d", "naïve café Ｆｕｌｌ",
    "<|im_start|>user\n<|im_end|>", "\ufffd\ufffd", "\u0f43 \u2126 \u212b \u0344 \u0958 \ufb1d", "a" * 3000, " " * 3000, "1" * 3000, "ab " * 1000,
    "\u0345\u0301\u0323" * 40, "e" + "\u0301" * 300 + "\u0323" * 300,
]


def random_texts(seed: int, n: int) -> list[str]:
    """Short strings of mixed alphabets: what a rule may cut in two stands side by side more often than in prose."""
    r = random.Random(seed)
    alphabets: list[Callable[[], str]] = [
        lambda: r.choice("abcxyzABCXYZ"), lambda: r.choice("abcxyz") * r.randint(1, 6), lambda: " " * r.randint(1, 4),
        lambda: r.choice("\n\r\t \u00a0\u0085\u2003\u3000\x0b"), lambda: str(r.randint(0, 10**r.randint(1, 8))),
        lambda: r.choice("'\u2019") + r.choice(["s", "S", "t", "re", "RE", "vE", "m", "LL", "d", "x", "\u017f"]),
        lambda: r.choice(".,;:!?/\\()[]{}<>|#$%&*+-=_~`@^\""), lambda: chr(r.randint(0x300, 0x36f)),
        lambda: chr(r.choice([r.randint(0xa0, 0x24f), r.randint(0x370, 0x1fff), r.randint(0x4e00, 0x9fff)])),
        lambda: chr(r.choice([r.randint(0, 0xd7ff), r.randint(0xe000, 0x323af)])), lambda: chr(r.randint(0x1f300, 0x1faff)),
        lambda: r.choice(["\u200d", "\ufe0f", "ʰ", "ª", "ǅ", "\u00b2", "Ⅳ", "<|", "|>", "<think>", "the ", " and", "ing", "é"]),
    ]
    return ["".join(r.choice(alphabets)() for _ in range(r.randint(1, 24))) for _ in range(n)]


def first_difference(model: capi.Model, tokenizer: Any, texts: list[str], specials: bool = False) -> str:
    """'' or the first text on which the two part, with both answers."""
    texts = [t for t in texts if oracle.normalises_alike(tokenizer, t)]
    for text, want in zip(texts, oracle.ids(tokenizer, texts, specials)):
        got = model.tokenize(text, parse_special=specials)
        if got != want:
            return f"{text[:200]!r}: {got[:40]}, not {want[:40]}"
    return ""


def vocabulary_file(peer_source: Path, name: str, folder: Path) -> Path:
    """llama.cpp's vocabulary as that of a llama model, whatever architecture the file names."""
    fields = oracle.fields(peer_source / "models" / f"ggml-vocab-{name}.gguf")
    known = {k.rpartition(".")[2]: value for k, value in fields.items()
             if k.startswith("tokenizer.ggml.") and not k.endswith((".scores", ".seperator_token_id"))}
    path = folder / f"{name}.gguf"
    return write_vocabulary(path, known.pop("tokens"), known.pop("token_type"), known.pop("merges"), **known)


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[capi.Model, Any]]:
    """(model, oracle) of a real vocabulary."""
    if request.param == "smollm":
        path = request.getfixturevalue("default_model")
    else:
        path = vocabulary_file(request.getfixturevalue("peer_source"), request.param, tmp_path_factory.mktemp("vocabulary"))
    model = capi.Model(path, vocab_only=True)
    yield model, oracle.read(path)
    model.close()


def write_vocabulary(path: Path, tokens: Any, types: Any, merges: Any, pre: str = "gpt-2", **more: Any) -> Path:
    """A vocabulary-only GGUF. A value of None leaves the key out."""
    w = gguf.GGUFWriter(path, "llama")
    w.add_block_count(1)  # what the core wants of every llama file
    w.add_context_length(64)
    w.add_embedding_length(32)
    w.add_feed_forward_length(32)
    w.add_head_count(1)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_tokenizer_model(more.pop("model", "gpt2"))
    w.add_tokenizer_pre(pre)
    for key, value in (("tokens", tokens), ("token_type", types), ("merges", merges), *more.items()):
        if isinstance(value, list):
            w.add_array(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, bool):
            w.add_bool(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, int):
            w.add_uint32(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, str):
            w.add_string(f"tokenizer.ggml.{key}", value)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    return path


def byte_characters() -> list[str]:
    import tiny

    return tiny.byte_characters()


def pair_vocabulary(seed: int) -> tuple[list[str], list[int], list[str]]:
    """Every byte, and every pair of the 160 bytes that test texts use most, ranked at random: where a rule cuts shows in the ids."""
    r = random.Random(seed)
    chars = byte_characters()
    used = [*range(9, 14), *range(32, 127), *range(128, 192), 0xc2, 0xc3, 0xcc, 0xcd, 0xe2, 0xe3, 0xe4, 0xf0]
    merges = [f"{chars[a]} {chars[b]}" for a in used for b in used]
    r.shuffle(merges)
    tokens = ["<|end|>", "<think>", *chars, *(m.replace(" ", "") for m in merges)]
    return tokens, [3, 4] + [1] * (len(tokens) - 2), merges


@pytest.fixture(scope="module", params=RULES)
def synthetic(request: pytest.FixtureRequest, library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[capi.Model, Any]]:
    tokens, types, merges = pair_vocabulary(1)
    path = write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "pairs.gguf", tokens, types, merges, request.param)
    model = capi.Model(path, vocab_only=True)
    yield model, oracle.build(tokens, types, merges, request.param)
    model.close()


# -- the same ids as Hugging Face ----------------------------------------------------------------------------------------


def test_awkward_texts(pair: tuple[capi.Model, Any]) -> None:
    assert first_difference(*pair, AWKWARD) == ""
    assert first_difference(*pair, AWKWARD, specials=True) == ""


def test_random_texts(pair: tuple[capi.Model, Any]) -> None:
    assert first_difference(*pair, random_texts(7, 10_000)) == ""


def test_rules_cut_alike(synthetic: tuple[capi.Model, Any]) -> None:
    assert first_difference(*synthetic, AWKWARD + random_texts(11, 3_000)) == ""
    assert first_difference(*synthetic, random_texts(12, 500), specials=True) == ""


UNICODE_17_NUMBERS = {*range(0x11de0, 0x11dea), *range(0x16ff4, 0x16ff7)}  # numbers to Rust (Digits of smollm), unassigned to Oniguruma


def test_code_points_have_their_class(synthetic: tuple[capi.Model, Any]) -> None:
    """Between letters, a mark, a number and blanks a code point shows whether the rules take it for what Oniguruma does:
    both ends of every range of one category, and others at random."""
    r = random.Random(2)
    category = [unicodedata.category(chr(c)) for c in range(0x32400)]
    edges = {c + side for c in range(1, len(category)) if category[c] != category[c - 1] for side in (-1, 0)}
    points = sorted(p for p in edges | {r.randrange(0x32400) for _ in range(5000)} | {*range(0xe0000, 0xe0200, 7)}
                    if not 0xd800 <= p < 0xe000 and p not in UNICODE_17_NUMBERS)
    assert len(points) > 10_000
    texts = ["".join(f"a{chr(c)}b {chr(c)} {chr(c)}A\u0301{chr(c)}1" for c in points[i : i + 50]) for i in range(0, len(points), 50)]
    assert first_difference(*synthetic, texts) == ""


def test_invalid_utf8_is_python_replacement(pair: tuple[capi.Model, Any]) -> None:
    model, tokenizer = pair
    r = random.Random(3)
    parts = [b"a", b" ", b"\xff", b"\x80", b"\xc3", b"\xe2\x82", b"\xe2\x82\xac", b"\xf0\x9f\x98", b"\xf0\x9f\x98\x80", b"\xed\xa0\x80",
             b"\xc0\xaf", b"\xf4\x90\x80\x80", b"\xef\xbf\xbd", b"\xe0\x80", b"\xf5", b"1"]
    for _ in range(2000):
        data = b"".join(r.choice(parts) for _ in range(r.randint(1, 12)))
        want = oracle.ids(tokenizer, [data.decode("utf-8", "replace")])[0]
        assert model.tokenize(data) == want, data


def test_nfc_is_unicodedata(library: Path, tmp_path: Path) -> None:
    """qwen2's normalisation alone, seen through a vocabulary of bytes."""
    path = write_vocabulary(tmp_path / "bytes.gguf", byte_characters(), [1] * 256, ["a no-such-token"], "qwen2")
    model = capi.Model(path, vocab_only=True)
    r = random.Random(4)
    known = [c for c in map(chr, [*range(0xd800), *range(0xe000, 0x2fa20)]) if unicodedata.category(c) != "Cn"]
    marks = [c for c in known if unicodedata.combining(c)]
    composites = [c for c in known if unicodedata.decomposition(c) and unicodedata.normalize("NFD", c) != c]
    hangul = [chr(c) for c in (0x1100, 0x1112, 0x1161, 0x1175, 0x11a7, 0x11a8, 0x11c2, 0xac00, 0xac01, 0xd7a3)]
    texts = composites + [unicodedata.normalize("NFD", c) for c in composites]
    for _ in range(5000):
        alphabets = [marks, composites, hangul, "aeiouAEO", known]
        texts.append("".join(r.choice(r.choice(alphabets)) for _ in range(r.randint(1, 10))))
    for text in texts:
        assert bytes(model.tokenize(text)) == unicodedata.normalize("NFC", text).encode(), ascii(text)
    model.close()


# -- the ids that others ship -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "qwen35", "gpt-2", "starcoder", "refact", "command-r", "mpt"])
def test_llama_cpp_expected_ids(library: Path, peer_source: Path, tmp_path: Path, name: str) -> None:
    path = vocabulary_file(peer_source, name, tmp_path)
    shipped = peer_source / "models" / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{shipped}.inp").read_bytes().split(b"\n__ggml_vocab_test__\n")
    want = [[int(i) for i in line.split()] for line in Path(f"{shipped}.out").read_text().split("\n")]
    assert len(texts) == len(want) > 40
    model = capi.Model(path, vocab_only=True)
    for text, ids in zip(texts, want):
        assert model.tokenize(text) == ids, text
    model.close()


def test_default_model_as_llama_server(library: Path, default_model: Path) -> None:
    model = capi.Model(default_model, vocab_only=True)
    rows = json.loads((DATA / "smollm2-tokenize.json").read_text())["tokenize"]
    assert len(rows) >= 10
    for row in rows:
        assert model.tokenize(row["text"], parse_special=True) == row["ids"], row["text"]
        assert model.tokenize(row["text"]) == row["ids_nospecial"], row["text"]
    model.close()


# -- bytes of tokens -----------------------------------------------------------------------------------------------------


def test_bytes_of_tokens_give_the_text_back(pair: tuple[capi.Model, Any], request: pytest.FixtureRequest) -> None:
    model, _ = pair
    nfc = "qwen2" in request.node.name
    for text in [t for t in AWKWARD + random_texts(5, 500) if not nfc or t.isascii()]:
        data = text.encode()
        got = b"".join(model.token_bytes(t) for t in model.tokenize(data))
        if "smollm" in request.node.name:  # its vocabulary lacks some bytes
            data = bytes(b for b in data if b in got)
        assert got == data


def test_bytes_of_every_token(pair: tuple[capi.Model, Any]) -> None:
    model, tokenizer = pair
    chars = {c: b for b, c in enumerate(byte_characters())}
    added = tokenizer.get_added_tokens_decoder()
    for i in range(model.info.n_vocab):
        spelling = tokenizer.id_to_token(i)
        mapped = i not in added and all(c in chars for c in spelling)
        assert model.token_bytes(i) == (bytes(chars[c] for c in spelling) if mapped else spelling.encode()), i


# -- added tokens, BOS, ends ---------------------------------------------------------------------------------------------

SPECIAL_TOKENS = ["<|bos|>", "<|im_end|>", "<|im_end|>x", "<tool>", "<tool>>", "<|endoftext|>", "[X]"]
SPECIAL_TYPES = [3, 3, 3, 4, 4, 3, 3]


def special_vocabulary(path: Path, **more: Any) -> Path:
    tokens = SPECIAL_TOKENS + byte_characters()
    return write_vocabulary(path, tokens, SPECIAL_TYPES + [1] * 256, ["a no-such-token"], **{"bos_token_id": 0, "eos_token_id": 5, **more})


def test_added_tokens(library: Path, tmp_path: Path) -> None:
    model = capi.Model(special_vocabulary(tmp_path / "a.gguf"), vocab_only=True)
    byte = {bytes([b]): len(SPECIAL_TOKENS) + b for b in range(256)}
    assert model.tokenize("<|im_end|>x<tool>><tool>", parse_special=True) == [2, 4, 3], "longest first"
    assert model.tokenize("a<|im_end|> <tool>") == [byte[bytes([b])] for b in b"a<|im_end|> "] + [3], "control only on request"
    assert model.tokenize("<|im_end|", parse_special=True) == [byte[bytes([b])] for b in b"<|im_end|"]
    assert model.token_bytes(1) == b"<|im_end|>" and model.token_bytes(3) == b"<tool>"
    assert model.is_control(1) and not model.is_control(3) and not model.is_control(8)
    assert model.eog == {1, 5} and model.info.eot == 1
    model.close()


@pytest.mark.parametrize("asked, text, parse, want", [
    (True, "[X]", True, [0, 6]), (True, "<|bos|>[X]", True, [0, 6]), (True, "<|bos|><|bos|>", True, [0, 0]), (True, "", True, [0]),
    (True, "[X]<|bos|>", True, [0, 6, 0]), (False, "[X]", True, [6]), (False, "<|bos|>[X]", True, [0, 6]),
])
def test_exactly_one_bos(library: Path, tmp_path: Path, asked: bool, text: str, parse: bool, want: list[int]) -> None:
    model = capi.Model(special_vocabulary(tmp_path / "b.gguf", add_bos_token=asked), vocab_only=True)
    assert model.tokenize(text, add_bos=True, parse_special=parse) == want
    model.close()


def test_text_never_becomes_a_control_token(library: Path, tmp_path: Path) -> None:
    """Not even where the file's merges or a whole piece lead to it."""
    tokens = byte_characters() + ["ab", "abc", "Ġx"]
    for pre in RULES:
        path = write_vocabulary(tmp_path / f"{pre}.gguf", tokens, [1] * 256 + [1, 3, 3], ["a b", "ab c", "Ġ x"], pre)
        model = capi.Model(path, vocab_only=True)
        assert model.tokenize("abc x") == [256, ord("c"), ord(" "), ord("x")], pre
        model.close()


# -- hostile and strange vocabularies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("change, named", [
    ({"tokens": []}, "tokenizer.ggml.tokens"), ({"tokens": 3}, "tokenizer.ggml.tokens"), ({"tokens": [1, 2]}, "tokenizer.ggml.tokens"),
    ({"token_type": [1, 1]}, "tokenizer.ggml.token_type"), ({"token_type": ["a"]}, "tokenizer.ggml.token_type"),
    ({"token_type": [99] * 258}, "tokenizer.ggml.token_type"), ({"merges": None}, "tokenizer.ggml.merges"), ({"merges": 7}, "tokenizer.ggml.merges"),
    ({"bos_token_id": "x"}, "tokenizer.ggml.bos_token_id"), ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token"),
    ({"model": "llama"}, "SentencePiece"), ({"model": "bert"}, "tokenizer.ggml.model"),
    ({"tokens": ["x" * 70_000] + ["a"] * 257}, "tokenizer.ggml.tokens"),
])
def test_broken_vocabularies_are_refused_by_name(library: Path, tmp_path: Path, change: dict[str, Any], named: str) -> None:
    fields = {"tokens": byte_characters() + ["ab", "<|x|>"], "token_type": [1] * 257 + [3], "merges": ["a b"], **change}
    path = write_vocabulary(tmp_path / "c.gguf", fields.pop("tokens"), fields.pop("token_type"), fields.pop("merges"), **fields)
    with pytest.raises(ModelError, match=named.replace(".", r"\.")):
        capi.Model(path, vocab_only=True)


def test_strange_vocabularies_are_read(library: Path, tmp_path: Path) -> None:
    """Duplicates, empty tokens, merges of nothing or of missing tokens, ids out of range, an unknown pre: warnings."""
    tokens = byte_characters() + ["ab", "ab", "", "", "<|x|>", "<|x|>", "abab"]
    merges = ["a b", "a b", "ab ab", "a", "", " ", "  ", "a ", " b", "zz q", "ab zz", "a b c", "ab a", "x" * 60_000 + " b"]
    path = write_vocabulary(tmp_path / "d.gguf", tokens, [1] * 256 + [1, 1, 1, 4, 3, 3, 1], merges, "no-such-rule", bos_token_id=10**6,
                            eos_token_id=2**32 - 1)
    capi.drain_log()
    model = capi.Model(path, vocab_only=True)
    log = "\n".join(line for _, line in capi.drain_log())
    for word in ("no-such-rule", "bos_token_id", "merges", "spelled like"):
        assert word in log
    assert model.tokenize("ababab") == [262, 256] and model.tokenize("<|x|>", parse_special=True) == [260]
    assert model.info.bos == -1 and model.token_bytes(258) == b""
    model.close()


def test_long_runs_end(pair: tuple[capi.Model, Any]) -> None:
    """Pieces of half a megabyte: n log n (a quadratic loop would not come back)."""
    model, _ = pair
    for unit in ("a", " ", "\n", "!", "<|"):
        n_bytes = 500_000
        tokens = model.tokenize(unit * (n_bytes // len(unit)), parse_special=True)
        assert sum(len(model.token_bytes(t)) for t in tokens) == n_bytes
    assert model.tokenize("e" + "\u0301\u0323" * 100_000)
