"""Text as tokens: its bytes, those of a tokenizer file, or a BPE of its own.

Losses per token of different vocabularies cannot be compared, bits per byte can. So
each token knows how many bytes of the text there are up to its end.
"""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from experiments.config import ConfigError, Data
from experiments.files import write_text

FILE = "tokenizer.json"
LOSSLESS = "use bytes, bpe:SIZE or a byte-level tokenizer.json, which lose nothing"
PIECE = 1 << 16  # bytes that are encoded at once, up to the end of their last line


class Text(NamedTuple):
    """A text as tokens.

    Attributes:
        tokens: integers, (n,).
        ends: how many bytes there are up to the end of each token, (n,), with all of
            a character that a token ends in.
    """

    tokens: np.ndarray
    ends: np.ndarray


class Tokenizer(Protocol):
    """What cuts texts into tokens, integers below `vocabulary`."""

    vocabulary: int

    def encode(self, text: bytes) -> Text:
        """The tokens of a text."""

    def decode(self, tokens: Sequence[int]) -> bytes:
        """The text of tokens."""

    def decode_after(self, before: Sequence[int], tokens: Sequence[int]) -> bytes:
        """The text of tokens that follow others."""

    def keep(self, directory: Path) -> None:
        """Writes what `of_run` needs to the directory of a run."""


def make(name: str, text: bytes) -> Tokenizer:
    """A tokenizer.

    Args:
        name: "bytes"; the path of a tokenizer.json, as the package `tokenizers` writes
            it; or "bpe:SIZE", which is learned.
        text: to learn from.

    Raises:
        ConfigError: there is no such tokenizer, the text is too short to learn one of
            that size, or the package is missing.
    """
    if name == "bytes":
        return Bytes()
    if name.endswith(".json"):
        return _read(Path(os.path.expanduser(name)))
    return _learned(text, int(name.removeprefix("bpe:")))


def of_run(directory: Path, data: Data) -> Tokenizer:
    """The tokenizer that a run was trained with.

    Raises:
        ConfigError: its file is missing or damaged.
    """
    return Bytes() if data.tokenizer == "bytes" else _read(directory / FILE)


class Bytes:
    """Each byte is a token."""

    vocabulary = 256

    def encode(self, text: bytes) -> Text:
        """The bytes of a text."""
        return Text(np.frombuffer(text, np.uint8), np.arange(1, len(text) + 1))

    def decode(self, tokens: Sequence[int]) -> bytes:
        """The text of bytes."""
        return bytes(tokens)

    def decode_after(self, before: Sequence[int], tokens: Sequence[int]) -> bytes:
        """The text of bytes, whatever was before."""
        return bytes(tokens)

    def keep(self, directory: Path) -> None:
        """Writes nothing: there is nothing to know."""


class Subwords:
    """A tokenizer of the package `tokenizers`, without its special tokens.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
        name: what the user calls it.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer, self._name = tokenizer, name
        # There may be gaps.
        self.vocabulary = max(tokenizer.get_vocab().values(), default=0) + 1

    def encode(self, text: bytes) -> Text:
        """The tokens of a text.

        Raises:
            ConfigError: the text is not UTF-8, or its tokens do not give it back: what
                they leave out would be counted among the bytes they predict.
        """
        pieces = _pieces(text)
        try:
            words = [piece.decode() for piece in pieces]
        except UnicodeDecodeError:
            raise ConfigError(
                "a tokenizer reads UTF-8, but the text is not; use "
                "data.tokenizer = 'bytes'"
            ) from None
        tokens, ends, before = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)], 0
        found = self._encode(words)
        for piece, encoding in zip(pieces, found, strict=True):
            char_ends = np.fromiter((end for _, end in encoding.offsets), np.int64)
            tokens.append(np.asarray(encoding.ids, np.int32))
            ends.append(before + _starts(piece)[char_ends])
            before += len(piece)
        return Text(np.concatenate(tokens), np.concatenate(ends))

    def _encode(self, texts: list[str]) -> list[Any]:
        try:
            found = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        except Exception as error:  # the package raises nothing more special
            message = f"{self._name} cannot read the text: {error}; {LOSSLESS}"
            raise ConfigError(message) from None
        ids = [encoding.ids for encoding in found]
        again = self._tokenizer.decode_batch(ids, skip_special_tokens=False)
        for before, after in zip(texts, again, strict=True):
            # Some put a space before a text, or take one away at either end.
            bare = before.removeprefix(" ")
            same = (before, f" {before}", bare, before.removesuffix(" "))
            if after not in (*same, bare.removesuffix(" ")):
                there, here = _difference(before, after)
                raise ConfigError(
                    f"{self._name} does not give the text back: {there!r} becomes "
                    f"{here!r}; {LOSSLESS}"
                )
        return found

    def decode(self, tokens: Sequence[int]) -> bytes:
        """The text of tokens; bytes that are no character become U+FFFD."""
        return self._decode(tokens).encode()

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def decode_after(self, before: Sequence[int], tokens: Sequence[int]) -> bytes:
        """The text of tokens that follow others, with the space between if any."""
        first, whole = self._decode(before), self._decode([*before, *tokens])
        # Bytes that are no character may spoil the last ones before them.
        known = os.path.commonprefix([first, whole])
        return whole[len(known) :].encode() if tokens else b""

    def keep(self, directory: Path) -> None:
        """Writes tokenizer.json.

        Raises:
            ConfigError: the directory has that of another tokenizer.
        """
        path, text = directory / FILE, self._tokenizer.to_str(pretty=True) + "\n"
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise ConfigError(
                f"{directory} holds a run with another tokenizer; name another"
            )
        write_text(path, text)


def _learned(text: bytes, size: int) -> Subwords:
    """Byte-level BPE: every text has an encoding, and is what that decodes to.

    Source: Sennrich et al. 2016, arXiv:1508.07909; Radford et al. 2019, Language models
        are unsupervised multitask learners (of bytes).
    """
    lib = _package()
    level = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = lib.Tokenizer(lib.models.BPE())
    made.pre_tokenizer, made.decoder = level, lib.decoders.ByteLevel()
    trainer = lib.trainers.BpeTrainer(
        vocab_size=min(size, 256 + len(text)),  # it makes room for so many at once
        initial_alphabet=sorted(level.alphabet()),
        show_progress=False,
    )
    lines = (line.decode(errors="replace") for line in text.splitlines(keepends=True))
    made.train_from_iterator(lines, trainer)
    learned = Subwords(made, f"bpe:{size}")
    if learned.vocabulary < size:
        raise ConfigError(
            f"data.tokenizer = 'bpe:{size}' finds only {learned.vocabulary} tokens in "
            "the text; use at most that or a longer text"
        )
    return learned


def _read(path: Path) -> Subwords:
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such tokenizer")
    lib = _package()
    try:
        made = lib.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more special
        raise ConfigError(f"{path} is no tokenizer: {error}") from None
    made.no_truncation()
    made.no_padding()
    made.post_processor = None  # which may leave spaces out of where a token ends
    if isinstance(made.model, lib.models.BPE):
        made.model.dropout = None  # or the same text would be cut in many ways
    return Subwords(made, str(path))


def _package() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ConfigError(
            "data.tokenizer needs the package tokenizers: "
            "pip install 'jattn[tokenizers]'"
        ) from None
    return tokenizers


def _difference(before: str, after: str) -> tuple[str, str]:
    """The places where two texts begin to differ."""
    start = max(0, len(os.path.commonprefix([before, after])) - 10)
    return before[start : start + 20], after[start : start + 20]


def _starts(text: bytes) -> np.ndarray:
    """Where its characters start, and where the last one ends."""
    # In UTF-8 all bytes of a character but the first are 10xxxxxx.
    starts = np.flatnonzero(np.frombuffer(text, np.uint8) & 0xC0 != 0x80)
    return np.append(starts, len(text))


def _pieces(text: bytes) -> list[bytes]:
    """The text in pieces of some lines, to bound what encoding needs at once."""
    lines = text.splitlines(keepends=True)
    starts = itertools.accumulate(map(len, lines), initial=0)
    groups = itertools.groupby(
        zip(starts, lines, strict=False), lambda pair: pair[0] // PIECE
    )
    return [b"".join(line for _, line in group) for _, group in groups]
