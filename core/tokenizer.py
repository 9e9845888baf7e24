"""Text to token ids and back, over the `tokenizers` library, with one rule added: text never makes a control token.

A tokenizer.json lists "added tokens" (`<|im_end|>`, `<tool_call>`, ...). The library turns their spelling into their
id wherever it stands, so a file that an agent prints could end the agent's own turn. `Tokenizer.encode` therefore
works on a copy without added tokens; only `token_id` hands a control id out, by name.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Iterable, Sequence

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

# The control tokens of the Qwen chat frame, in Qwen's order. The first three are `special`, the others are not: a
# decoder that skips specials keeps them.
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

# How MicroSWE text is cut before merging. Spaces, underscores, digits and punctuation never join a word, so that a
# name is the same ids wherever it stands: copying it is then a matter of copying ids.
PIECES = r"[A-Za-z]+|[0-9]|_+|\n *| +|[^A-Za-z0-9_\n ]+"

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def to_unicode(text: str) -> str:
    """The text with lone surrogates (JSON can spell them, UTF-8 cannot) replaced by U+FFFD."""
    return _LONE_SURROGATE.sub("\ufffd", text)


class Tokenizer:
    """A byte-level BPE from a Hugging Face tokenizer.json. Safe to share between threads."""

    def __init__(self, spec: str):
        """spec: the text of a tokenizer.json."""
        parsed = json.loads(spec)
        parsed["truncation"] = parsed["padding"] = None  # a saved cut or pad length must not change ids
        self.spec = spec
        self._full = tokenizers.Tokenizer.from_str(json.dumps(parsed))
        self._plain = tokenizers.Tokenizer.from_str(json.dumps({**parsed, "added_tokens": [], "post_processor": None}))
        self.vocab_size = 1 + max(self._full.get_vocab(with_added_tokens=True).values())
        self.control_ids = frozenset(t["id"] for t in parsed.get("added_tokens", ()))
        self._check_controls([(t["content"], t["id"]) for t in parsed.get("added_tokens", ())])

    def _check_controls(self, added: Sequence[tuple[str, int]]) -> None:
        """ValueError unless every added token is there once, is its one id, and no encoded text makes it."""
        times = Counter(name for name, _ in added)
        for name, id in added:
            ids = self._full.encode(name, add_special_tokens=False).ids
            if times[name] > 1:
                raise ValueError(f"added token {name!r} is listed {times[name]} times; it must be there once")
            if ids != [id]:
                raise ValueError(f"added token {name!r} is encoded as the ids {ids}; it must be {id}, as it is listed")
            if not self.control_ids.isdisjoint(self.encode(name)):
                raise ValueError(f"added token {name!r} is also an entry of the vocabulary that ordinary text is encoded "
                                 "with, so text could forge it; use a tokenizer.json that lists it only as added")

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a tokenizer.json, or the one in a model folder."""
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file; a model folder holds a tokenizer.json")
        try:
            return cls(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception
            why = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"{file}: not a usable tokenizer.json: {why}") from None

    def save(self, folder: str | Path) -> Path:
        """Write tokenizer.json into a folder that exists; byte for byte what was loaded or trained."""
        file = Path(folder) / "tokenizer.json"
        file.write_text(self.spec, encoding="utf-8")
        return file

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of any text, trusted or not. Never yields an added token, however the text is spelt."""
        return tuple(self._plain.encode(to_unicode(text), add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens spelt out. Bytes that are not UTF-8 become U+FFFD."""
        return self._full.decode(list(ids), skip_special_tokens=False)

    def token_id(self, name: str) -> int:
        """Id of a control token by its spelling."""
        found = self._full.token_to_id(name)
        if found is None:
            raise ValueError(f"the tokenizer has no token {name!r}; use the tokenizer of a Qwen chat model")
        return found

    def has(self, name: str) -> bool:
        """Whether there is a control token of this spelling."""
        return self._full.token_to_id(name) in self.control_ids

    def token(self, id: int) -> str | None:
        """The spelling of an id as the vocabulary stores it, or None if no token has it."""
        return self._full.id_to_token(id) if 0 <= id < self.vocab_size else None

    def fits(self, model_vocab_size: int) -> None:
        """Raise ValueError unless every id is a row of the model's embedding (spare rows are fine)."""
        if self.vocab_size > model_vocab_size:
            raise ValueError(
                f"tokenizer ids = 0..{self.vocab_size - 1} must be below the model's vocab_size = {model_vocab_size}; "
                "use the tokenizer the model was made with"
            )


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a small byte-level BPE: 256 bytes, merges, then the nine control tokens, `vocab_size` in all.

    Fewer where the texts run out of pairs to merge. Any text survives a round trip. The same texts in any order give
    the same tokenizer.json.
    """
    controls = len(SPECIAL) + len(MARKS)
    if vocab_size < 256 + controls:
        raise ValueError(f"vocab_size = {vocab_size} must be at least {256 + controls} (bytes and controls)")
    bpe = tokenizers.Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([cut, to_bytes])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - controls,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    bpe.add_tokens([AddedToken(name, special=False, normalized=False) for name in MARKS])
    return Tokenizer(bpe.to_str())
