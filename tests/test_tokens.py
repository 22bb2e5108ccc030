"""Texts are cut into tokens without losing count of their bytes."""

import dataclasses
import hashlib
import sys

import numpy as np
import pytest

from experiments.config import Config, ConfigError, Data, Evaluation, from_dict
from experiments.data import Corpus, batch, check_length, split_of
from experiments.tokens import PIECE, Bytes, Subwords, make, of_run

TEXT = "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. €5!\n" * 40


@pytest.fixture(scope="module")
def learned():
    pytest.importorskip("tokenizers")
    return make("bpe:300", TEXT.encode())


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """The file of a tokenizer of few words, that puts a space before the first."""
    lib = pytest.importorskip("tokenizers")
    model = lib.models.WordLevel({"?": 0, "▁one": 1, "▁öl": 7}, unk_token="?")
    made = lib.Tokenizer(model)
    made.pre_tokenizer = lib.pre_tokenizers.Metaspace()
    made.decoder = lib.decoders.Metaspace()
    made.add_special_tokens(["<s>"])
    made.post_processor = lib.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    made.save(str(path))
    return path


def corpus_of(text):
    data = text.encode() if isinstance(text, str) else text
    return Corpus("x", np.frombuffer(data, np.uint8), hashlib.sha256(data).hexdigest())


def test_the_bytes_of_a_text_are_its_tokens():
    text = Bytes().encode("öl".encode())
    assert (text.tokens.tolist(), text.ends.tolist()) == ([195, 182, 108], [1, 2, 3])
    assert Bytes().decode([195, 182]) == "ö".encode()


def test_a_learned_tokenizer_loses_nothing_and_is_shorter_than_the_bytes(learned):
    unseen = "A quite different text: £3, 語\r\n\r\n\ttabs  and\n  spaces "
    for text in (TEXT, unseen):
        cut = learned.encode(text.encode())
        assert learned.decode(cut.tokens.tolist()) == text.encode()
        assert cut.ends[-1] == len(text.encode())
        assert (np.diff(cut.ends) >= 0).all()
    assert learned.vocabulary == 300
    assert len(learned.encode(TEXT.encode()).tokens) < len(TEXT.encode()) / 2


def test_a_tokenizer_is_learned_the_same_again(learned, tmp_path):
    learned.keep(tmp_path)
    make("bpe:300", TEXT.encode()).keep(tmp_path)  # refused if it were another
    with pytest.raises(ConfigError, match="holds a run with another tokenizer"):
        make("bpe:299", TEXT.encode()).keep(tmp_path)


def test_a_run_finds_its_tokenizer_again(learned, tmp_path):
    learned.keep(tmp_path)
    found = of_run(tmp_path, Data(tokenizer="bpe:300"))
    assert found.vocabulary == 300
    text = TEXT[:99].encode()
    assert found.encode(text).tokens.tolist() == learned.encode(text).tokens.tolist()
    assert of_run(tmp_path, Data()).vocabulary == 256
    with pytest.raises(ConfigError, match="there is no such tokenizer"):
        of_run(tmp_path / "elsewhere", Data(tokenizer="bpe:300"))


def test_ends_count_bytes_whatever_a_tokenizer_does_to_the_first_space(words):
    made = make(str(words), b"")
    for space in ("", " "):
        cut = made.encode(f"{space}one öl one".encode())
        assert cut.tokens.tolist() == [1, 7, 1]  # and no <s>
        assert (cut.ends - len(space)).tolist() == [3, 7, 11]
    assert made.vocabulary == 8  # for its largest is 7


def lossy(lib, kind):
    """A tokenizer that loses some of TEXT."""
    if kind == "lower case":
        made = lib.Tokenizer(lib.models.BPE())
        made.normalizer = lib.normalizers.Lowercase()
        trainer = lib.trainers.BpeTrainer(show_progress=False)
    elif kind == "alphabet":
        made = lib.Tokenizer(lib.models.BPE())
        trainer = lib.trainers.BpeTrainer(limit_alphabet=20, show_progress=False)
    else:
        unknown = {"unk_token": "[UNK]"} if kind == "unknown" else {}
        words = {"[UNK]": 0, "den": 1, "über": 2}
        made = lib.Tokenizer(lib.models.WordLevel(words, **unknown))
        made.pre_tokenizer = lib.pre_tokenizers.Whitespace()
        return made
    made.train_from_iterator([TEXT], trainer)
    made.decoder = lib.decoders.Fuse()
    return made


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "lower case",
            "does not give the text back: 'Zwölf Boxkämpfer jag' becomes 'zw",
        ),
        ("alphabet", "does not give the text back: 'Zwölf Boxk"),
        ("unknown", r"becomes '\[UNK\] \[UNK\]"),
        ("uncovered", r"cannot read the text: .*Missing \[UNK\] token"),
    ],
)
def test_a_tokenizer_that_loses_text_is_refused(tmp_path, kind, message):
    path = tmp_path / "lossy.json"
    lossy(pytest.importorskip("tokenizers"), kind).save(str(path))
    data = Data(tokenizer=str(path))
    with pytest.raises(ConfigError, match=message) as caught:
        split_of(corpus_of(TEXT), data)
    assert str(caught.value).startswith(str(path))
    assert str(caught.value).endswith(
        "bpe:SIZE or a byte-level tokenizer.json, which lose nothing"
    )


def test_a_loss_at_the_end_of_a_long_text_is_found(tmp_path):
    path = tmp_path / "lossy.json"
    lossy(pytest.importorskip("tokenizers"), "lower case").save(str(path))
    made, text = make(str(path), b""), TEXT.lower() * (2 * PIECE // len(TEXT) + 1)
    assert made.encode(text.encode()).ends[-1] == len(text.encode())
    with pytest.raises(ConfigError, match=r"€5!\\nDeich' becomes 'eich. €5!\\ndeich'"):
        made.encode(f"{text}Deich".encode())


@pytest.mark.parametrize("prefix", [False, True])
def test_a_byte_level_file_reads_every_text(tmp_path, prefix):
    lib = pytest.importorskip("tokenizers")
    made = lib.ByteLevelBPETokenizer(add_prefix_space=prefix)
    made.train_from_iterator([TEXT[:99]], vocab_size=270, show_progress=False)
    made.save(str(tmp_path / "x.json"))
    text = "Ünseen\r\n\t 語  <s> ".encode()
    assert make(str(tmp_path / "x.json"), b"").encode(text).ends[-1] == len(text)


def test_what_a_file_says_of_length_and_chance_is_not_obeyed(learned, tmp_path):
    lib = pytest.importorskip("tokenizers")
    learned.keep(tmp_path)
    stored = lib.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    stored.enable_truncation(5)
    stored.enable_padding(length=9)
    stored.model.dropout = 0.9
    stored.save(str(tmp_path / "other.json"))
    made = make(str(tmp_path / "other.json"), b"")
    for text in (b"ab", TEXT.encode()):
        assert made.encode(text).tokens.tolist() == learned.encode(text).tokens.tolist()
    made.keep(tmp_path)  # refused if it were another


def test_a_tokenizer_of_the_home_directory_is_found(words, monkeypatch):
    monkeypatch.setenv("HOME", str(words.parent))
    assert make("~/tokenizer.json", b"").vocabulary == 8


def test_what_follows_is_decoded_with_the_space_that_is_between(words, learned):
    made = make(str(words), b"")
    assert made.decode([1, 7, 1]) == "one öl one".encode()
    assert made.decode_after([1], [7, 1]) == " öl one".encode()
    assert made.decode_after([1], []) == b""
    cut = learned.encode("großen Sylter".encode()).tokens.tolist()
    assert learned.decode_after(cut[:3], cut[3:]) == learned.decode(cut[3:])
    assert Bytes().decode_after([97], [98]) == b"b"


def test_a_long_text_is_cut_in_pieces_and_the_count_goes_on(learned):
    text = (TEXT * (2 * PIECE // len(TEXT) + 1)).encode()
    cut = learned.encode(text)
    assert cut.ends[-1] == len(text) > 2 * PIECE
    assert learned.decode(cut.tokens.tolist()) == text


def test_windows_of_ends_tell_the_bytes_of_windows_of_tokens(learned):
    text = learned.encode(TEXT.encode())
    options = dict(seed=3, step=5, batch=4, context=7)
    tokens, ends = (batch(part, **options) for part in text)
    for row, end in zip(tokens, ends, strict=True):
        piece = TEXT.encode()[end[0] : end[-1]].decode(errors="replace")
        assert learned.decode(row[1:].tolist()).decode().strip("�") in piece


def test_a_text_is_never_split_inside_a_character():
    corpus = corpus_of("ab€€")
    for share, left in ((0.9, 1), (0.7, 2), (0.6, 5), (0.5, 5), (0.4, 5), (0.1, 8)):
        train, validation = corpus.split(share)
        assert len(train) == left and len(train) + len(validation) == 8


def test_what_is_learned_is_learned_from_the_part_to_train_on(learned):
    corpus = corpus_of(TEXT + "xyzzy " * 100)
    data = Data(tokenizer="bpe:300", validation_fraction=0.2)
    tokenizer, _, validation = split_of(corpus, data)
    assert len(tokenizer.encode(b"xyzzy").tokens) == 5
    assert tokenizer.decode(validation.tokens.tolist()).endswith(b"xyzzy " * 100)
    again = split_of(corpus_of(corpus.data.tobytes()), data)
    assert again.tokenizer is tokenizer  # learned once


def test_a_text_that_is_too_short_in_tokens_is_refused(learned):
    config = Config(
        data=Data(context=8, batch=2, validation_fraction=0.3),
        evaluation=Evaluation(tokens=400),
    )
    check_length(corpus_of(TEXT), config)
    data = dataclasses.replace(config.data, tokenizer="bpe:300")
    with pytest.raises(ConfigError, match=r"needs 401 tokens, but this split has \d"):
        check_length(corpus_of(TEXT), dataclasses.replace(config, data=data))


@pytest.mark.parametrize("size", [400, 2**31 - 1])
def test_a_text_that_is_too_short_for_a_vocabulary_is_refused(learned, size):
    message = f"'bpe:{size}' finds only 311 tokens in the text; use at most that"
    with pytest.raises(ConfigError, match=message):
        make(f"bpe:{size}", TEXT.encode())


def test_a_text_that_is_not_utf_8_is_refused_by_all_but_bytes(learned):
    with pytest.raises(ConfigError, match="use data.tokenizer = 'bytes'"):
        learned.encode(b"ab\xff")
    assert Bytes().encode(b"ab\xff").ends[-1] == 3


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    path = tmp_path / "x.json"
    with pytest.raises(ConfigError, match=r"x\.json: there is no such tokenizer"):
        make(str(path), b"")
    pytest.importorskip("tokenizers")
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"x\.json is no tokenizer: "):
        make(str(path), b"")


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'jattn\[tokenizers\]'"):
        make("bpe:300", b"x")
    assert make("bytes", b"x").vocabulary == 256


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bpe", "must be bytes, bpe:SIZE or the path of a tokenizer.json"),
        ("bpe:256", "must have a size above 256"),
        ("bpe:2147483648", r"must have .* below 2\*\*31"),
        (f"bpe:{'9' * 5000}", r"must have .* below 2\*\*31"),
        ("bpe:-1", "must be bytes"),
        ("tokenizer.model", "must be bytes"),
    ],
)
def test_an_impossible_tokenizer_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        from_dict({"data": {"tokenizer": name}})
    for name in ("bpe:257", "bpe:9.json"):
        assert from_dict({"data": {"tokenizer": name}}).data.tokenizer == name


def test_bytes_that_are_no_character_do_not_bring_the_prompt_again():
    lib = pytest.importorskip("tokenizers")
    vocabulary = {f"<0x{n:02X}>": n for n in range(256)} | {"a": 256, "<unk>": 257}
    model = lib.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    made = lib.Tokenizer(model)
    steps = [lib.decoders.ByteFallback(), lib.decoders.Fuse()]
    made.decoder = lib.decoders.Sequence(steps)
    tokenizer = Subwords(made, "own")
    prompt = tokenizer.encode("aé".encode()).tokens.tolist()
    assert prompt == [256, 0xC3, 0xA9]
    assert tokenizer.decode_after(prompt, [256]) == b"a"
    spoilt = tokenizer.decode_after(prompt, [0xC3, 256]).decode()
    assert spoilt.strip("\ufffd") == "a"  # and not "aéa"


def test_a_space_at_either_end_of_a_piece_is_no_loss():
    lib = pytest.importorskip("tokenizers")
    made = lib.Tokenizer(lib.models.WordLevel({"to": 0, "be": 1}, unk_token="<unk>"))
    made.pre_tokenizer = lib.pre_tokenizers.Whitespace()
    tokenizer = Subwords(made, "own")
    for text in (b"to be", b" to be", b"to be ", b" to be "):
        assert tokenizer.encode(text).tokens.tolist() == [0, 1]
    with pytest.raises(ConfigError, match="does not give the text back"):
        tokenizer.encode(b"to  be")


def test_tokens_end_where_their_spaces_end(tmp_path):
    lib = pytest.importorskip("tokenizers")
    level = lib.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made = lib.Tokenizer(lib.models.BPE())
    made.pre_tokenizer, made.decoder = level, lib.decoders.ByteLevel()
    made.post_processor = lib.processors.ByteLevel(trim_offsets=True)
    alphabet = sorted(level.alphabet())
    trainer = lib.trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["the cat sat "] * 20, trainer)
    path = tmp_path / "own.json"
    made.save(str(path))
    tokenizer = make(str(path), b"")
    tokens, ends = tokenizer.encode(b"the cat sat")
    whole = [
        len(tokenizer.decode(tokens[: n + 1].tolist())) for n in range(len(tokens))
    ]
    assert ends.tolist() == whole
