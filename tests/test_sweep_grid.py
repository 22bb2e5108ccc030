"""A sweep runs every point once, keeps what is finished, and survives interruptions."""

import json
from dataclasses import replace

import pytest

import experiments.sweep as module
from experiments.config import (
    Config,
    ConfigError,
    Coord,
    Data,
    Evaluation,
    Theory,
    grid,
    run_id,
    to_dict,
)
from experiments.files import read_json, write_json
from experiments.progress import Silent

LISTS = {"model.d_k": [4, 6], "seed": [0, 1, 2]}
ARMS = {"model.scale": ["sqrt", "none"]}


@pytest.fixture
def config(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 4)
    return Config(
        out=str(tmp_path / "out"),
        data=Data(source=str(text), context=8, batch=2),
        evaluation=Evaluation(tokens=32),
    )


@pytest.fixture
def calls(monkeypatch):
    """Replace everything that computes, and record the calls."""
    made = []

    def train(config, corpus, directory, progress):
        made.append(run_id(config))
        summary = {
            "id": run_id(config),
            "config": to_dict(config),
            "status": "diverged" if config.seed == 1 else "finished",
            "metrics": {"step": 1, "validation_loss": None, "bytes_per_token": 1.0},
            "corpus": {"bytes": 1, "sha256": corpus.sha256},
            "baselines": {},
            "probe": {"initial": {"mean": {}}, "final": None},
        }
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / "summary.json", summary)
        return summary

    def record(name):
        tables = {
            "theory": {"keys": 1, "rows": []},
            "coord": {"lr": 1.0, "d_k": [], "steps": [], "scales": {}},
        }
        return lambda *args: made.append(name) or tables[name]

    monkeypatch.setattr(module, "train", train)
    monkeypatch.setattr(module, "theory_table", record("theory"))
    monkeypatch.setattr(module, "coordinate_check", record("coord"))
    monkeypatch.setattr(module, "write_report", lambda path: path / "report.html")
    return made


def test_the_grid_is_the_product_of_the_lists_and_the_last_varies_fastest():
    points = grid(Config(), LISTS)
    assert [(p.model.d_k, p.seed) for p in points] == [
        (4, 0),
        (4, 1),
        (4, 2),
        (6, 0),
        (6, 1),
        (6, 2),
    ]
    assert grid(Config(), {}) == [Config()]


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"model.dk": [4]}, "did you mean 'model.d_k'?"),
        ({"model": {"d_k": [4]}}, 'in quotes, as in "model.d_k" = [...]'),
        ({"modle.layer": [1]}, "did you mean 'model.layers'?"),
        ({"seed.x": [1]}, "there is no table 'seed'"),
        ({"model.d_k": 4}, "must be a list"),
        ({"model.d_k": []}, "must be a list of at least one value"),
        ({"model.d_k": [4, 5]}, "model.d_k = 5 must be even"),
        ({"seed": [0, 0]}, "two points are the same run"),
        ({"theory.keys": [8]}, "'theory.keys' does not change a training run"),
        ([4], "must be a table"),
    ],
)
def test_a_bad_list_is_refused(lists, message):
    with pytest.raises(ConfigError) as caught:
        grid(Config(), lists)
    assert message in str(caught.value)


def test_every_point_is_run_once_in_grid_order(config, calls):
    report = module.sweep(config, LISTS, Silent())
    ids = [run_id(point) for point in grid(config, LISTS)]
    assert calls == ids
    written = read_json(report.parent / "sweep.json")
    assert (written["runs"], written["sweep"]) == (ids, LISTS)
    assert {path.name for path in report.parent.iterdir()} >= set(ids)


@pytest.mark.parametrize(
    ("scales", "about_the_factor"),
    [
        (["sqrt", "none"], True),
        (["inv", "none", "init", "sqrt"], True),
        (["none"], False),
        (["sqrt", "inv"], False),
    ],
)
def test_theory_and_coordinate_check_are_parts_of_a_sweep_about_the_factor(
    config, calls, scales, about_the_factor
):
    module.sweep(config, {"model.scale": scales}, Silent())
    assert len(calls) == len(scales) + 2 * about_the_factor
    assert (calls[:2] == ["theory", "coord"]) == about_the_factor


def test_a_text_that_no_run_reads_is_not_asked_for(config, calls):
    absent = replace(config, data=replace(config.data, source="absent"))
    module.sweep(absent, {"data.source": [config.data.source]}, Silent())
    assert len(calls) == 1


def test_a_second_sweep_computes_nothing(config, calls):
    module.sweep(config, LISTS, Silent())
    calls.clear()
    module.sweep(config, LISTS, Silent())
    assert calls == []


def test_an_interrupted_sweep_continues_where_it_stopped(config, calls, monkeypatch):
    lists = ARMS | LISTS
    ids = [run_id(point) for point in grid(config, lists)]
    train = module.train

    def interrupted(config, *args):
        if run_id(config) == ids[3]:
            raise KeyboardInterrupt
        return train(config, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "train", interrupted)
        module.sweep(config, lists, Silent())
    assert calls == ["theory", "coord", *ids[:3]]
    module.sweep(config, lists, Silent())
    assert calls == ["theory", "coord", *ids]


def test_a_table_of_other_settings_is_computed_again(config, calls):
    def theory(keys):
        changed = Config(out=config.out, theory=Theory(keys=keys))
        return module.theory(changed, Silent())

    assert theory(8) == theory(8)
    theory(9)
    assert calls == ["theory", "theory"]


def test_a_coordinate_check_of_another_text_or_width_is_computed_again(config, calls):
    corpus = module.load_corpus(config.data.source)
    other = module.Corpus("other", corpus.data[1:], "0" * 64)
    narrow = Config(out=config.out, data=config.data, coord=Coord(d_k=(2, 4)))
    for settings, text in [(config, corpus), (config, corpus), (config, other)]:
        module.coord(settings, text, Silent())
    module.coord(narrow, other, Silent())
    assert calls == ["coord"] * 3


def test_a_finished_run_of_another_text_is_refused(config, calls):
    corpus = module.load_corpus(config.data.source)
    module.run(config, corpus, Silent())
    other = module.Corpus("other", corpus.data[1:], "0" * 64)
    with pytest.raises(ConfigError, match="another text"):
        module.run(config, other, Silent())


def test_a_sweep_that_cannot_be_run_writes_nothing(config, calls, tmp_path):
    with pytest.raises(ConfigError, match="too short"):
        module.sweep(config, {"data.context": [8, 512]}, Silent())
    assert calls == [] and not (tmp_path / "out").exists()


def test_the_name_of_another_experiment_is_refused_and_nothing_is_written(
    config, calls, tmp_path
):
    module.sweep(config, LISTS, Silent())
    calls.clear()
    before = {x: x.read_bytes() for x in tmp_path.rglob("*") if x.is_file()}
    for other in ({"seed": [0, 3]}, {"model.d_k": [4], "seed": [0, 1, 2]}):
        with pytest.raises(ConfigError, match="another experiment; set another --name"):
            module.sweep(config, other, Silent())
    after = {x: x.read_bytes() for x in tmp_path.rglob("*") if x.is_file()}
    assert after == before and calls == []


def test_the_lists_of_an_experiment_may_be_extended(config, calls):
    module.sweep(config, LISTS, Silent())
    calls.clear()
    longer = LISTS | {"seed": [0, 1, 2, 3]}
    report = module.sweep(config, longer, Silent())
    assert len(calls) == 2
    assert read_json(report.parent / "sweep.json")["sweep"] == longer


DAMAGE = ("", "{", "{}", "[1]", "null", "\x00", "[" * 100_000)


@pytest.mark.parametrize("text", DAMAGE, ids=range(len(DAMAGE)))
@pytest.mark.parametrize("name", ["sweep", "theory", "coord", "summary"])
def test_a_damaged_file_stops_a_sweep_and_is_named(config, calls, name, text):
    directory = module.sweep(config, ARMS, Silent()).parent
    path = next(directory.rglob(f"{name}.json"))
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        module.sweep(config, ARMS, Silent())
    assert str(caught.value).startswith(f"{path} is damaged (")
    assert str(caught.value).endswith("; remove it to compute it again")
    path.unlink()
    module.sweep(config, ARMS, Silent())
    assert path.exists()


def test_a_file_that_lacks_an_inner_key_is_damaged(config, calls):
    (path,) = module.sweep(config, {}, Silent()).parent.rglob("summary.json")
    summary = read_json(path)
    for wrong in ({"bytes": 1}, {"bytes": 1, "sha256": 2}):
        write_json(path, summary | {"corpus": wrong})
        with pytest.raises(ConfigError, match=r"damaged \(.*'corpus.sha256'"):
            module.sweep(config, {}, Silent())


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "value.json"
    write_json(path, {"loss": 1.5})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"loss": float("nan")})
    assert json.loads(path.read_text()) == {"loss": 1.5}
    assert list(tmp_path.iterdir()) == [path]
