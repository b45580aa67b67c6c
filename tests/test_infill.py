"""completions' suffix: fill-in-the-middle in the model's own tokens, or a 400 that names the field."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from milad.conversation import Turn
from milad.errors import MiladError
from milad.turn import FIM, Defaults, Runner


class Bytes:
    """A model whose tokens are bytes, and the marks it was given."""
    path = "bytes.gguf"
    eog = frozenset({0})

    def __init__(self, marks: tuple[str, ...] = (), named: tuple[Any, ...] = (), add_bos: bool = False) -> None:
        self.specials = {m: 300 + i for i, m in enumerate(marks)}
        self.info = SimpleNamespace(bos=256, add_bos=add_bos, n_vocab=400, n_params=1)
        self._named = dict(zip((f"tokenizer.ggml.fim_{p}_token_id" for p in ("pre", "suf", "mid")), named))

    def metadata(self, key: str | None = None) -> Any:
        return self._named.get(key)

    def tokenize(self, text: Any, *, add_bos: bool = False, parse_special: bool = False) -> list[int]:
        return ([256] if add_bos else []) + list(text.encode())

    def is_control(self, token: int) -> bool:
        return token >= 256


def tokens(model: Any, **turn: Any) -> list[int]:
    family: Any = SimpleNamespace(stops=lambda specials: ())
    return Runner(model, None, None, family, n_ctx=100, defaults=Defaults()).tokens(Turn(api="completions", **turn))


@pytest.mark.parametrize("marks", FIM)
def test_known_spellings(marks: tuple[str, str, str]) -> None:
    assert tokens(Bytes(marks), prompt="a", suffix="b") == [300, 97, 301, 98, 302]


def test_the_file_names_them_and_bos_comes_first() -> None:
    model = Bytes(named=(10, 11, 12), add_bos=True)
    assert tokens(model, prompt="a", suffix="b") == [256, 10, 97, 11, 98, 12]
    assert tokens(model, prompt=(5, 6), suffix="b") == [256, 10, 5, 6, 11, 98, 12]
    assert tokens(model, prompt="a") == [256, 97]


@pytest.mark.parametrize("named", [(), (10, 11), (10, 11, 4000), (10, "x", 12)])
def test_without_marks_it_is_refused(named: tuple[Any, ...]) -> None:
    with pytest.raises(MiladError, match="fill-in-the-middle") as e:
        tokens(Bytes(FIM[0][:2], named), prompt="a", suffix="b")
    assert e.value.status == 400 and e.value.param == "suffix"
