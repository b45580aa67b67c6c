"""What the model generated, kept as tokens: a conversation that comes back as text gets the very tokens that are in the cache.

Text that is tokenised again, or rendered again from a client's JSON, need not give the tokens that were generated; the prefix
cache would end there. splice() walks a new prompt; where its beginning is a remembered prompt and what follows says the same as
the generation did, the generated tokens stand in.

Rules
- "The same" is: the same bytes, with control tokens at the same places, up to the last point where both token lists have a
  boundary. So text never becomes a control token, and a prompt's bytes never change.
- Or, for a turn without thinking whose fingerprint the caller knows (tag): the whole turn, up to its end token, if the message
  at that place has that fingerprint. This holds where JSON was written anew; bytes may then differ, the meaning does not.
- Bounded in tokens; the longest unused go first.

note() belongs to the engine's thread, splice() and tag() to any: they only look up, which the GIL makes atomic. Pure.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from hashlib import blake2b
from typing import Callable, Sequence as Seq

from ..conversation import Message, Text, Thinking, ToolCall

MAX_TOKENS = 1 << 20        # of generations: 4 MiB
MAX_ENTRIES = 4096
MAX_SAME = 4                # generations kept for one prompt


def fingerprint(message: Message) -> bytes | None:
    """What an assistant's message says, whatever its JSON looks like; None: it holds thinking or no content that is compared."""
    parts: list[object] = []
    for part in message.parts:
        if isinstance(part, Text):
            if part.text.strip():
                parts.append(part.text.strip())
        elif isinstance(part, ToolCall):
            parsed = part.parsed
            parts.append([part.name, part.arguments if parsed is None else parsed])
        elif not (isinstance(part, Thinking) and not part.text.strip()):
            return None
    try:
        text = json.dumps(parts, sort_keys=True)
    except (ValueError, RecursionError):
        return None
    return blake2b(text.encode("ascii"), digest_size=16).digest() if parts else None


class _Entry:
    __slots__ = ("tokens", "index", "print")

    def __init__(self, tokens: array) -> None:
        self.tokens = tokens
        self.index = -1                     # of the message among its conversation's assistant messages
        self.print: bytes | None = None


class Memory:
    def __init__(self, token_bytes: Callable[[int], bytes], is_control: Callable[[int], bool],
                 stop_ids: frozenset[int] = frozenset()) -> None:
        """stop_ids: the tokens that end a turn."""
        self._token_bytes = token_bytes
        self._is_control = is_control
        self._stop_ids = stop_ids
        self._entries: OrderedDict[bytes, list[_Entry]] = OrderedDict()
        self._lengths: dict[int, int] = {}      # length of remembered prompts -> how many of them
        self._prompts: dict[bytes, int] = {}    # key -> its length
        self.n_tokens = 0
        self.n_spliced = 0                      # generations put in place of other tokens

    def note(self, tokens: array, n_prompt: int) -> None:
        """A generation ended: tokens[:n_prompt] was its prompt, the rest came from the model."""
        made = tokens[n_prompt:]
        if not made or len(made) > MAX_TOKENS:
            return
        key = _key(tokens[:n_prompt])
        entries = self._entries.get(key, [])
        kept = [e for e in entries if e.tokens != made][-MAX_SAME + 1:]
        self.n_tokens += len(made) - sum(len(e.tokens) for e in entries) + sum(len(e.tokens) for e in kept)
        self._entries[key] = kept + [_Entry(made)]
        self._entries.move_to_end(key)
        if not entries:
            self._prompts[key] = n_prompt
            self._lengths[n_prompt] = self._lengths.get(n_prompt, 0) + 1
        while self.n_tokens > MAX_TOKENS or len(self._entries) > MAX_ENTRIES:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        key, entries = self._entries.popitem(last=False)
        self.n_tokens -= sum(len(e.tokens) for e in entries)
        n = self._prompts.pop(key)
        self._lengths[n] -= 1
        if not self._lengths[n]:
            del self._lengths[n]

    def tag(self, prompt: Seq[int], index: int, print_: bytes | None) -> None:
        """Says what the latest generation after `prompt` means: the fingerprint of its message, which is the index-th
        assistant message of its conversation. For one that ended with Done: note() came before it."""
        entries = self._entries.get(_key(array("i", prompt)))
        if entries and print_ is not None:
            entries[-1].index, entries[-1].print = index, print_

    def splice(self, tokens: Seq[int], prints: Seq[bytes | None] = ()) -> list[int]:
        """The prompt with what is remembered in place. prints: fingerprints of the conversation's assistant messages in order."""
        lengths = sorted(list(self._lengths))
        if not lengths or lengths[0] > len(tokens):
            return list(tokens)
        source, at = array("i", tokens), 0
        out = array("i")
        digest, n_hashed = blake2b(digest_size=16), 0
        for n in lengths:
            if n < len(out):                    # inside what was just put in
                continue
            end = at + n - len(out)
            if end >= len(source):
                break
            out += source[at:end]
            at = end
            digest.update(out[n_hashed:n].tobytes())
            n_hashed = n
            entries = self._entries.get(digest.copy().digest())
            if entries:
                at = self._put(source, at, entries, prints, out)
        out += source[at:]
        return out.tolist()

    def _put(self, source: array, at: int, entries: list[_Entry], prints: Seq[bytes | None], out: array) -> int:
        """Appends the generation that covers most of source[at:]; returns where source goes on."""
        best_at, best = at, array("i")
        for entry in reversed(entries):
            n_source, n_made = self._align(source, at, entry.tokens)
            if n_source > best_at:
                best_at, best = n_source, entry.tokens[:n_made]
            if entry.print is not None and entry.index < len(prints) and prints[entry.index] == entry.print:
                end = self._turn_end(source, at)
                if entry.tokens[-1] in self._stop_ids and end > best_at and source[end - 1] == entry.tokens[-1]:
                    best_at, best = end, entry.tokens
        if best != source[at:best_at]:
            self.n_spliced += 1
        out += best
        return best_at

    def _turn_end(self, source: array, at: int) -> int:
        for i in range(at, len(source)):
            if source[i] in self._stop_ids:
                return i + 1
        return at

    def _align(self, source: array, at: int, made: array) -> tuple[int, int]:
        """(a, b): source[at:a] and made[:b] are the same bytes and control tokens, a and b as large as they can be."""
        a, b = at, 0
        best = a, b
        left_a = left_b = b""
        while True:
            if left_a == left_b:                # both empty, or a boundary after the same bytes
                left_a = left_b = b""
                best = a, b
                if a == len(source) or b == len(made):
                    return best
                x, y = source[a], made[b]
                a, b = a + 1, b + 1
                if x == y:
                    continue
                if self._is_control(x) or self._is_control(y):
                    return best
                left_a, left_b = self._token_bytes(x), self._token_bytes(y)
            if left_a.startswith(left_b):
                left_a, left_b = left_a[len(left_b):], b""
                if left_a and (b == len(made) or self._is_control(made[b])):
                    return best
                if left_a:
                    left_b = self._token_bytes(made[b])
                    b += 1
            elif left_b.startswith(left_a):
                left_a, left_b = b"", left_b[len(left_a):]
                if a == len(source) or self._is_control(source[a]):
                    return best
                left_a = self._token_bytes(source[a])
                a += 1
            else:
                return best


def _key(prompt: array) -> bytes:
    return blake2b(prompt.tobytes(), digest_size=16).digest()
