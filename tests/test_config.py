"""Settings are read completely or refused with the words that repair them."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.claims import NAMES
from experiments.config import (
    KINDS,
    Config,
    ConfigError,
    Model,
    Optim,
    from_dict,
    load,
    override,
    run_id,
    settings_of,
    to_dict,
)
from experiments.parse import paths

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))


def refusal(table):
    with pytest.raises(ConfigError) as caught:
        from_dict(table)
    return str(caught.value)


def test_an_empty_table_is_the_default_config():
    assert from_dict({}) == Config()


def test_values_arrive_in_their_fields():
    table = {"seed": 3, "model": {"d_k": 4, "qk_norm": True}, "optim": {"lr": 0.5}}
    expected = Config(seed=3, model=Model(d_k=4, qk_norm=True), optim=Optim(lr=0.5))
    assert from_dict(table) == expected


def test_a_config_survives_json():
    config = Config(model=Model(scale="inv"), optim=Optim(lr=0.1 + 0.2))
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"optm": {}}, "unknown key 'optm'; did you mean 'optim'?"),
        ({"optim": {"lrr": 1}}, "unknown key 'optim.lrr'; did you mean 'optim.lr'?"),
        ({"model": {"d-k": 4}}, "unknown key 'model.d-k'; did you mean 'model.d_k'?"),
        ({"warmup": 1}, "unknown key 'warmup'; the keys here are name, seed, out"),
        ({"optim": {"hedas": 2}}, "did you mean 'model.heads'?"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(table, message):
    assert message in refusal(table)


@pytest.mark.parametrize(
    ("table", "home"),
    [
        ({"lr": 1}, "'lr' belongs at 'optim.lr'"),
        ({"model": {"context": 8}}, "'context' belongs at 'data.context'"),
        ({"d_k": 8}, "'d_k' belongs at 'model.d_k'"),
    ],
)
def test_a_key_in_the_wrong_table_is_told_its_home(table, home):
    assert home in refusal(table)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"optim": {"lr": "1e-3"}}, "optim.lr = '1e-3' must be a number"),
        ({"optim": {"lr": True}}, "optim.lr = True must be a number"),
        ({"seed": True}, "seed = True must be a whole number"),
        ({"seed": 1.0}, "seed = 1.0 must be a whole number"),
        ({"model": {"qk_norm": 1}}, "model.qk_norm = 1 must be true or false"),
        ({"name": 7}, "name = 7 must be a text"),
        ({"model": 7}, "model = 7 must be a table"),
        ({"coord": {"d_k": 16}}, "coord.d_k = 16 must be a list"),
        ({"coord": {"d_k": [16, "x"]}}, "coord.d_k[1] = 'x' must be a whole number"),
    ],
)
def test_a_wrong_type_is_refused_with_its_path(table, message):
    assert message in refusal(table)


def test_a_whole_number_is_a_number():
    assert isinstance(from_dict({"optim": {"lr": 1}}).optim.lr, float)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"model": {"d_k": 15}}, "model.d_k = 15 must be even"),
        ({"data": {"context": 1}}, "data.context = 1 must be at least 2"),
        (
            {"logging": {"profile": 3}, "optim": {"steps": 1}},
            "logging.profile = 3 traces the steps after the first, which compiles, but "
            "optim.steps = 1; set it to 2 or more",
        ),
        ({"coord": {"d_k": [16, 3]}}, "coord.d_k[1] = 3 must be even"),
        ({"model": {"layers": 0}}, "model.layers = 0 must be at least 1"),
        ({"optim": {"lr": -1e-3}}, "optim.lr = -0.001 must be positive"),
        ({"optim": {"lr": float("nan")}}, "optim.lr = nan must be finite"),
        (
            {"optim": {"clip_norm": float("inf")}},
            "optim.clip_norm = inf must be finite",
        ),
        ({"optim": {"warmup_fraction": 1.0}}, "must be in [0, 1)"),
        ({"data": {"validation_fraction": 0}}, "must be between 0 and 1"),
        ({"seed": -1}, "seed = -1 must be from 0"),
        ({"name": "../up"}, "name = '../up' must be a file name"),
        ({"theory": {"d_k": []}}, "theory.d_k = [] must be a list of at least one"),
    ],
)
def test_an_impossible_value_is_refused_with_its_rule(table, message):
    assert message in refusal(table)


def test_a_misspelt_choice_names_the_nearest_one():
    message = refusal({"model": {"scale": "sqr"}})
    assert message == (
        "model.scale = 'sqr' must be one of 'sqrt', 'none', 'inv', 'init'; "
        "did you mean 'sqrt'?"
    )


def test_no_warm_up_is_possible():
    assert from_dict({"optim": {"warmup_fraction": 0}}).optim.warmup_fraction == 0.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = ", "is not TOML"),
        ("[optim]\nlr = -1.0", "optim.lr = -1.0 must be positive"),
        ("[sweep]\n'model.dk' = [4]", "did you mean 'model.d_k'?"),
        ("[sweep]\nmodel.d_k = [4]", 'as in "model.d_k" = [...]'),
    ],
)
def test_a_fault_in_a_file_names_the_file(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}") and message in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file"):
        load(tmp_path / "absent.toml")


def kind_of(path):
    return tomllib.loads(path.read_text())["kind"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_in_the_repository_loads_and_tells_its_command(path):
    config, sweep = load(path)
    command = "sweep" if isinstance(config, Config) else kind_of(path)
    assert config.name == path.stem and bool(sweep) == (command == "sweep")
    assert f"python -m experiments {command} configs/{path.name}" in path.read_text()


def test_options_override_the_file():
    args = ["--optim.lr", "1e-2", "--model.scale", "none", "--coord.d-k", "4", "8"]
    config = override(Config(seed=5), args)
    assert (config.seed, config.optim.lr, config.model.scale) == (5, 0.01, "none")
    assert config.coord.d_k == (4, 8)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--optim.lrr", "1"], "did you mean 'optim.lr'?"),
        (["--lr=1"], "'lr' belongs at 'optim.lr'"),
        (["--optim.lr", "much"], "optim.lr: could not convert"),
        (["--optim.lr", "-1"], "must be positive"),
        (["--model.scale", "log"], "invalid choice 'log'"),
        (["stray"], "'stray' is not an option"),
    ],
)
def test_a_bad_option_is_refused_in_one_sentence(args, message):
    with pytest.raises(ConfigError) as caught:
        override(Config(), args)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value) and "│" not in str(caught.value)


def shown(cls, capsys):
    """The text of --help, in one line."""
    with pytest.raises(SystemExit):
        override(cls(), ["--help"])
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.parametrize("kind", [*KINDS, "all", *NAMES])
def test_every_setting_has_a_help_text(kind, capsys):
    cls = settings_of(kind)
    text = shown(cls, capsys)
    assert [x for x in paths(cls) if f" --{x.replace('_', '-')}" not in text] == []
    # Nothing between the values that an option takes and its default.
    values = r"[A-Z]+|[\[{][^()]*[\]}]"
    assert re.findall(rf"(--\S+)(?: (?:{values}))? \(default:", text) == []


def test_the_help_tells_what_a_tokenizer_may_be(capsys):
    text = shown(Config, capsys)
    assert re.search(r"--data.tokenizer STR bytes, bpe:SIZE, .* tokenizer.json ", text)


@given(st.integers(0, 2**31 - 1), st.floats(1e-6, 1.0))
def test_the_id_depends_on_the_settings_alone(seed, lr):
    config = Config(seed=seed, optim=Optim(lr=lr))
    assert run_id(config) == run_id(from_dict(to_dict(config)))
    assert run_id(config) != run_id(replace(config, seed=(seed + 1) % 2**31))


def test_what_does_not_change_a_run_does_not_change_its_id():
    args = ["--name", "other", "--out", "there", "--theory.keys", "3"]
    assert run_id(override(Config(), [*args, "--coord.lr", "1"])) == run_id(Config())
