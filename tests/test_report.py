"""The report: complete, self-contained, and as honest as the numbers it is given."""

import json
import re
from io import StringIO
from itertools import product
from pathlib import Path

import pytest
from markup import assert_well_formed
from rich.console import Console

from experiments.config import Config, ConfigError, to_dict
from experiments.figures import training_figure
from experiments.page import format_cell
from experiments.report import print_tables, write_report
from experiments.results import MEASURES, read_results

SECTIONS = [
    "what-was-run",
    "theory",
    "initialisation",
    "coordinate-check",
    "training",
    "conclusion",
]
BASELINES = {"unigram": 3.31, "bigram": 2.43, "trigram": 2.05}


def measures(scale, d_k):
    """About what a small unscaled (or scaled) transformer shows before training."""
    strength = d_k / 16 if scale == "none" else 0.25
    spread = d_k**0.5 if scale == "none" else 1.0
    return {
        "row_norm_median": 0.06 / strength**1.4,
        "row_norm_rms": 0.08,
        "dead_share": 1 - 1 / max(1.0, strength) ** 0.3,
        "entropy": 0.9 / spread**0.8,
        "max_probability": 1 - 0.8 / spread,
        "saturated_share": 0.8 - 0.8 / spread,
        "softmax_derivative": 0.9 / spread,
        "logit_std": spread,
        "logit_max": 4 * spread,
        "wq_gradient_norm": 0.26 * strength**0.6,
        "wk_gradient_norm": 0.24 * strength**0.6,
    }


def loss(scale, d_k, lr, seed):
    cost = {"none": 0.06 + 0.015 * d_k**0.5 / 4, "sqrt": 0.0}.get(scale, 0.03)
    wobble = 0.004 * (seed % 2) if scale == "none" else 0.0
    return 2.33 + cost - 5 * (lr - 3e-3) + wobble + 0.01 * seed


def write_run(
    directory, scale="none", d_k=16, lr=3e-3, seed=0, *, value=None, diverged=False,
    probe=measures, **model,
):  # fmt: skip
    config = to_dict(Config(seed=seed))
    config["model"] |= {"scale": scale, "d_k": d_k, **model}
    config["optim"]["lr"] = lr
    tag = "-".join([scale, str(d_k), f"{lr:g}", str(seed), *map(str, model.values())])
    run = directory / tag
    run.mkdir(parents=True)
    value = loss(scale, d_k, lr, seed) if value is None else value
    mean = {"heads": [[probe(scale, d_k)] * 2] * 2, "mean": probe(scale, d_k)}
    summary = {
        "id": tag,
        "config": config,
        "status": "diverged" if diverged else "finished",
        "metrics": {
            "step": 17 if diverged else 360,
            "train_loss": None if diverged else value,
            "validation_loss": None if diverged else value,
            "bytes_per_token": 1.0,
        },
        "corpus": {"name": "plays <&>", "bytes": 5300000, "sha256": "ab" * 32},
        "baselines": BASELINES,
        "probe": {"initial": mean, "final": None if diverged else mean},
    }
    if diverged:
        summary["reason"] = "loss is nan at step 17"
    claim = {"config": config, "sha256": summary["corpus"]["sha256"]}
    (run / "config.json").write_text(json.dumps(claim))
    (run / "summary.json").write_text(json.dumps(summary))
    lines = [
        {"step": s, "loss": value + 2.6 / (1 + s / 25)}
        for s in range(20, 361 if not diverged else 17, 20)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return tag


def write_sweep(directory, runs, **extra):
    sweep = {
        "name": "scaling",
        "runs": runs,
        "config": to_dict(Config()),
        "sweep": {"model.scale": ["none", "sqrt"]},
        "machine": {"python": "3.11", "jax": "0.10.2", "date": "2030-01-01"},
    }
    (directory / "sweep.json").write_text(json.dumps(sweep | extra))


def write_theory(directory, shift=0.5):
    def quantity(value):
        error = 0.005 * value
        return {
            "quadrature": value,
            "monte_carlo": value + shift * error,
            "standard_error": error,
        }

    rows = [
        {
            "d_k": d_k,
            "scale": scale,
            "trace": quantity(0.96 if scale == "sqrt" else 2.3 / d_k**0.5),
            "entropy": quantity(3.68 if scale == "sqrt" else 5 / d_k**0.5),
        }
        for d_k, scale in product((16, 64, 256, 1024), ("none", "sqrt"))
    ]
    (directory / "theory.json").write_text(json.dumps({"keys": 64, "rows": rows}))


def write_coord(directory):
    d_k, steps = [16, 64, 256, 1024], [0, 1, 4, 16]
    slopes = {
        "none": [0.5, 0.5, 0.55, 0.65],
        "sqrt": [0.0, 0.01, 0.08, 0.19],
        "inv": [-0.5, -0.48, -0.39, -0.22],
        "init": [0.0, 0.21, 0.39, 0.54],
    }
    scales = {
        scale: {"std": [[0.8 * d**s for d in d_k] for s in slope], "slope": slope}
        for scale, slope in slopes.items()
    }
    coord = {"lr": 3e-3, "d_k": d_k, "steps": steps, "scales": scales}
    (directory / "coord.json").write_text(json.dumps(coord))


def write_everything(directory):
    """Two arms and one more scale, three d_k, two learning rates, three seeds."""
    points = product(("none", "sqrt", "inv"), (16, 64, 256), (3e-3, 1e-2), range(3))
    runs = [write_run(directory, *point) for point in points]
    runs.append(write_run(directory, "none", 256, 3e-2, 0, diverged=True))
    write_sweep(directory, [*runs, "missing"])
    write_theory(directory)
    write_coord(directory)


@pytest.fixture
def full(tmp_path):
    """A directory that holds every file, to be changed."""
    write_everything(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The page and the printed tables of such a directory."""
    directory = tmp_path_factory.mktemp("sweep")
    write_everything(directory)
    return page(directory), printed(directory)


def page(directory):
    return write_report(directory).read_text()


def printed(directory):
    console = Console(file=StringIO(), width=300)
    print_tables(console, directory)
    return console.file.getvalue()


def heading(text, id):
    """The text of one section."""
    start = text.index(f'<h2 id="{id}">')
    return text[start : text.index("</section>", start)]


def test_every_section_is_there_in_order(whole):
    text = whole[0]
    places = [text.index(f'<h2 id="{id}">') for id in SECTIONS]
    assert places == sorted(places)
    assert all(f'href="#{id}"' in text for id in SECTIONS)


def test_the_page_needs_nothing_else(whole):
    text = whole[0]
    for word in ("http", "<script", "<link", "src=", "@import", "url(http", "<?xml"):
        assert word not in text, word
    assert '<meta name="viewport"' in text
    assert text.count("<svg") == 4
    assert text.count('class="scroll"') == text.count("<table")


def test_the_page_is_well_formed(whole):
    assert_well_formed(whole[0])


def test_identifiers_are_unique(whole):
    ids = re.findall(r' id="([^"]*)"', whole[0])
    assert len(set(ids)) == len(ids)


def test_names_from_outside_are_escaped(whole):
    assert "plays &lt;&amp;&gt;" in whole[0]
    assert "plays <&>" not in whole[0]


def test_the_same_files_give_the_same_page(full):
    text = page(full)
    assert page(full) == text


def test_both_renderings_show_the_same_cells(whole):
    text, terminal = whole[0], whole[1]
    for cell in (
        "0.0763 (95 %: 0.0706 to 0.0821), 3 paired seeds",
        "trigram",
        "0.00862",
        "-0.390",
        "0.5764 ± 0.0029",
    ):
        assert cell in text, cell
        assert cell in terminal, cell
    assert all(name in text for name in MEASURES.values())


def test_a_narrow_terminal_gets_a_wide_table_in_parts(full):
    console = Console(file=StringIO(), width=80)
    print_tables(console, full)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    heads = [line for line in lines if line.startswith("┃ d_k ┃ scale ┃")]
    assert sum("W_K gradient" in head for head in heads) == 2  # before and after


def test_floats_have_three_significant_digits():
    floats = {2.3456: "2.35", 123.4: "123", 0.0: "0.00", 1.234e-6: "1.23e-06"}
    assert all(format_cell(value) == text for value, text in floats.items())
    assert format_cell(123456) == "123456"
    assert format_cell(None) == "–"


def test_an_unfinished_run_is_named(whole):
    assert "missing" in heading(whole[0], "what-was-run")


def test_a_diverged_run_is_listed_with_its_reason(whole):
    training = heading(whole[0], "training")
    assert "Diverged runs" in training
    assert "loss is nan at step 17" in training
    assert "flatters its arm" in training


@pytest.mark.parametrize(
    ("extra", "shown"),
    [
        ({"command": "python -m experiments sweep <a>.toml"}, "sweep &lt;a&gt;.toml"),
        ({"command": ""}, "not recorded"),
        ({}, "not recorded"),
    ],
)
def test_the_command_is_shown(tmp_path, extra, shown):
    write_sweep(tmp_path, [write_run(tmp_path)], **extra)
    assert shown in heading(page(tmp_path), "what-was-run")


def test_runs_of_another_sweep_in_the_directory_are_left_out(full):
    write_run(full, "sqrt", 1024)
    assert "1024" not in heading(page(full), "initialisation")


def test_the_usual_story_holds_in_part_where_only_the_norms_contradict(whole):
    conclusion = heading(whole[0], "conclusion")
    assert "suffers”: holds in part" in conclusion
    assert "4 × holds, 1 × does not hold" in conclusion
    assert "Why the gradient norms of W_Q and W_K grow" in conclusion
    assert "A claim holds if all its conditions are met" in conclusion


def test_the_conclusion_is_a_short_table_then_a_block_for_each_claim(whole):
    conclusion = heading(whole[0], "conclusion")
    titles = re.findall("<h3>(.*?)</h3>", conclusion)
    assert titles[0] == "In short"
    assert titles[2] == "The softmax saturates: holds"
    assert titles[4] == "The gradients of W_Q and W_K vanish: does not hold"
    assert titles[6].startswith("Why the gradient norms")
    assert conclusion.count('<p class="note">Rule: ') == 5
    assert conclusion.index("</table>") < conclusion.index(": holds</h3>")


def test_the_text_of_the_tables_and_of_training_is_counted(whole):
    training = heading(whole[0], "training")
    # Not exactly so many: the split is not inside a character.
    assert "whole training split, about 4,770,000 bytes" in training
    assert "training reads 368,640" in training  # 360 steps x 16 windows x 64 bytes
    assert "13 times as much text" in training


def test_each_arm_is_compared_with_the_bigram_table(tmp_path):
    for seed, value in enumerate((2.3, 2.5)):
        write_run(tmp_path, "none", seed=seed, value=value)
        write_run(tmp_path, "sqrt", seed=seed, value=2.2)
    write_run(tmp_path, "inv", diverged=True)
    table = printed(tmp_path).split("Validation loss")[1]
    beaten = dict(re.findall(r"(none|sqrt|inv) .* (\d of \d) *│\n", table))
    assert beaten == {"none": "1 of 2", "sqrt": "2 of 2", "inv": "0 of 1"}


def test_rows_at_the_largest_size_are_told_in_a_sentence(whole):
    training = heading(whole[0], "training")
    assert "At d_k 256, the largest, training takes without the factor" in training
    dead = f"{100 * measures('none', 256)['dead_share']:.3g} %"
    assert f"dead rows from {dead} to {dead} and saturated rows" in training
    assert "; with it (lr 0.01) dead rows from 0 % to 0 %" in training


def test_what_a_row_is_about_stays_in_view(whole):
    training = heading(whole[0], "training")
    table = '<table class="two">\n<thead><tr><th>d_k</th><th>scale</th>'
    assert training.count(table) == 3  # losses, probe, diverged runs
    assert "position: sticky" in whole[0]


def test_a_wide_first_column_leaves_the_second_one_free(tmp_path):
    for init in ("gpt2", "lecun"):
        write_run(tmp_path, init=init)
    assert "<th>setting</th><th>d_k</th>" in page(tmp_path)
    assert 'class="two"' not in page(tmp_path)


def test_the_legend_fills_the_place_of_a_missing_panel(full):
    runs = read_results(full).runs
    three = training_figure(runs)
    two = training_figure([run for run in runs if run.d_k != 16])
    assert all(word in three for word in ("d_k 256", "n-gram tables", "sqrt"))
    heights = [float(re.search(r'viewBox="0 0 \S+ (\S+)"', f)[1]) for f in (two, three)]
    assert heights[1] < 2 * heights[0]


def test_opposite_numbers_give_the_opposite_verdict(tmp_path):
    swapped = {"none": "sqrt", "sqrt": "none"}
    for scale, d_k, seed in product(swapped, (16, 256), range(3)):
        value = loss(swapped[scale], d_k, 3e-3, seed)
        write_run(tmp_path, scale, d_k, seed=seed, value=value,
                  probe=lambda _, d_k: measures("sqrt", d_k))  # fmt: skip
    conclusion = heading(page(tmp_path), "conclusion")
    assert "suffers”: not resolved" in conclusion
    assert "1 × not resolved, 4 × does not hold" in conclusion
    assert "Why the gradient norms" not in conclusion
    slopes = {"none": {"std": [[1.0]], "slope": [0.0]}}
    slopes["sqrt"] = {"std": [[1.0]], "slope": [0.5]}
    coord = {"lr": 1e-3, "d_k": [16], "steps": [0], "scales": slopes}
    (tmp_path / "coord.json").write_text(json.dumps(coord))
    assert "suffers”: does not hold" in heading(page(tmp_path), "conclusion")


def test_one_seed_is_not_resolved(tmp_path):
    for scale in ("none", "sqrt"):
        write_run(tmp_path, scale)
    assert "one seed: not resolved" in heading(page(tmp_path), "training")
    assert "one seed: not resolved" in printed(tmp_path)


def test_another_setting_that_varies_has_a_column_and_is_not_mixed(tmp_path):
    for scale, init, seed in product(("none", "sqrt"), ("gpt2", "lecun"), range(2)):
        value = 2 + seed / 10 + (scale == "none") * (0.1 if init == "gpt2" else 0.3)
        write_run(tmp_path, scale, seed=seed, value=value, init=init)
    ids = re.findall(r' id="([^"]*)"', page(tmp_path))
    assert len(set(ids)) == len(ids)
    gap = printed(tmp_path).split("Gap at equal")[1].splitlines()
    assert any("init gpt2" in line and "0.100 (95 %" in line for line in gap)
    assert any("init lecun" in line and "0.300 (95 %" in line for line in gap)


def test_a_disagreeing_law_is_said_to_disagree(tmp_path):
    write_sweep(tmp_path, [])
    write_theory(tmp_path, shift=9)
    assert "in 0 of 16 comparisons" in heading(page(tmp_path), "theory")


@pytest.mark.parametrize("missing", ["theory.json", "coord.json", "sweep.json"])
def test_a_missing_file_is_said_to_be_missing(full, missing):
    (full / missing).unlink()
    text = page(full)
    assert all(f'<h2 id="{id}">' in text for id in SECTIONS)
    assert (f"{missing} is missing" in text) == (missing != "sweep.json")
    printed(full)


def test_an_empty_directory_has_a_report_that_says_so(tmp_path):
    text = page(tmp_path)
    assert text.count("No run has finished") == 3
    assert "Runs finished: 0; diverged: 0; not finished: 0." in text
    printed(tmp_path)


def test_a_sweep_of_which_no_run_has_finished_resolves_nothing(tmp_path):
    write_sweep(tmp_path, ["missing"])
    assert "suffers”: not resolved" in page(tmp_path)


def test_one_arm_of_two_has_no_gap(tmp_path):
    write_sweep(tmp_path, [write_run(tmp_path), "missing"])
    assert "Only one arm has runs" in page(tmp_path)


def test_a_single_run_has_a_report(tmp_path):
    tag = write_run(tmp_path)
    assert f"<h1>{tmp_path.name}</h1>" in page(tmp_path)
    assert f"<h1>{tag}</h1>" in page(tmp_path / tag)


@pytest.mark.parametrize("scales", [("sqrt",), ("none", "inv"), ("sqrt", "init")])
def test_runs_that_cannot_tell_what_the_factor_does_are_not_asked(tmp_path, scales):
    for scale, lr in product(scales, (1e-3, 1e-2)):
        write_run(tmp_path, scale, lr=lr)
    text, terminal = page(tmp_path), printed(tmp_path)
    for words in ("does attention need", "suffers”", "missing", "the factor"):
        assert words not in text and words not in terminal
    assert re.findall('<h2 id="(.*?)"', text) == [SECTIONS[i] for i in (0, 2, 4)]
    assert ("The arms of the experiment" in text) == (len(scales) > 1)
    assert_well_formed(text)


def test_runs_of_the_same_id_on_two_texts_are_both_there(tmp_path):
    names = [tmp_path / name for name in "ab"]
    for name, sha256, value in zip(
        names, ("1" * 64, "2" * 64), (2.1, 2.2), strict=True
    ):
        run = name / write_run(name, value=value)
        summary = json.loads((run / "summary.json").read_text())
        summary["corpus"] |= {
            "sha256": sha256,
            "bytes": 1000 if name.name == "a" else 20,
        }
        (run / "summary.json").write_text(json.dumps(summary))
    found = read_results(*names)
    assert [run.loss for run in found.runs] == [2.1, 2.2]
    labels = [f"source shakespeare ({c * 8})" for c in "12"]
    assert [run.label for run in found.runs] == labels
    text = write_report(tmp_path, *names).read_text()
    assert "<td>runs finished</td><td>2</td>" in text
    assert "<td>text, bytes</td><td>1000, 20</td>" in text


def test_runs_with_a_changed_tokenizer_file_are_told_apart(tmp_path):
    runs = [tmp_path / name / write_run(tmp_path / name) for name in "abc"]
    for run, tokenizer in zip(runs, ("one", "two", "two"), strict=True):
        for file in ("config.json", "summary.json"):
            table = json.loads((run / file).read_text())
            table["config"]["data"]["tokenizer"] = f"{run.parent.name[0]}.json"
            (run / file).write_text(json.dumps(table))
        (run / "tokenizer.json").write_text(tokenizer)
    found = read_results(*runs)
    assert [run.label for run in found.runs] == ["tokenizer a.json"] + [
        "tokenizer b.json"
    ] * 2


def test_the_same_run_in_two_places_counts_as_one(tmp_path):
    for name in "ab":
        for scale, seed in product(("none", "sqrt"), range(2)):
            write_run(tmp_path / name, scale, seed=seed)
    text = write_report(tmp_path, tmp_path / "a", tmp_path / "b").read_text()
    assert "<td>runs finished</td><td>8</td>" in text
    assert "2 paired seeds" in text and "count as one, with their mean" in text
    assert "count as one" not in page(tmp_path / "a")


def test_what_is_logged_makes_no_other_arm(tmp_path):
    for scale, every in (("none", 20), ("sqrt", 10)):
        run = tmp_path / write_run(tmp_path, scale)
        summary = json.loads((run / "summary.json").read_text())
        summary["config"]["logging"]["every"] = every
        (run / "summary.json").write_text(json.dumps(summary))
    assert {run.label for run in read_results(tmp_path).runs} == {""}


def test_a_directory_may_be_named_by_a_dot(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / write_run(tmp_path))
    text = page(Path("."))
    assert "<td>runs finished</td><td>1</td>" in text
    assert "<h1>none-16-0.003-0</h1>" in text


def test_an_unfinished_run_has_a_report_of_what_it_set_out_to_do(tmp_path):
    tag = write_run(tmp_path, lr=0.0123)
    (tmp_path / tag / "summary.json").unlink()
    for directory in (tmp_path, tmp_path / tag):
        text = page(directory)
        assert text.count("No run has finished") == 3
        assert f"<td>runs not finished</td><td>{tag}</td>" in text
        assert "<td>optim.lr</td><td>0.0123</td>" in text
        assert "ab" * 32 in text


def test_a_run_in_progress_is_left_out_of_the_comparison(tmp_path):
    tags = [write_run(tmp_path, scale) for scale in ("none", "sqrt", "inv")]
    (tmp_path / tags[2] / "summary.json").unlink()
    text = page(tmp_path)
    assert f"<td>runs not finished</td><td>{tags[2]}</td>" in text
    assert "<td>inv</td>" not in text


def test_runs_that_all_diverged_have_a_report(tmp_path):
    for scale in ("none", "sqrt"):
        write_run(tmp_path, scale, diverged=True)
    text = page(tmp_path)
    assert "no finished pair: not resolved" in text
    assert "After training" not in text


@pytest.mark.parametrize("text", ["{", "{}", "[1]"])
@pytest.mark.parametrize("name", ["sweep", "theory", "coord", "summary"])
def test_a_damaged_file_stops_the_report_and_is_named(full, name, text):
    path = next(full.rglob(f"{name}.json"))
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"{name}\.json is damaged \(.*; remove it"):
        write_report(full)
    assert not (full / "report.html").exists()


@pytest.mark.parametrize("text", ["{", "{}", "3"])
def test_damaged_metrics_stop_the_report_and_are_named(full, text):
    path = next(full.rglob("metrics.jsonl"))
    path.write_text(path.read_text() + text + "\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is damaged \(line \d"):
        write_report(full)
