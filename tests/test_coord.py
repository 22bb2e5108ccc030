"""The coordinate check knows the slopes that theory gives at initialisation."""

import pytest

from experiments.config import Config, Coord, Data, Evaluation, Model, Probe
from experiments.coord import coordinate_check
from experiments.data import load_corpus
from experiments.progress import Silent

pytestmark = pytest.mark.usefixtures("quick_compiler")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 100)
    config = Config(
        data=Data(source=str(path), context=16, batch=4),
        model=Model(layers=1, d_model=32, heads=2, d_v=4, d_ff=8),
        evaluation=Evaluation(tokens=64),
        probe=Probe(batch=4),
        coord=Coord(d_k=(16, 256), steps=(0, 2), seeds=2),
    )
    return coordinate_check(config, load_corpus(str(path)), Silent())


@pytest.mark.parametrize(
    ("scale", "slope"), [("none", 0.5), ("sqrt", 0.0), ("inv", -0.5), ("init", 0.0)]
)
def test_at_initialisation_the_slope_is_that_of_the_factor(table, scale, slope):
    assert table["scales"][scale]["slope"][0] == pytest.approx(slope, abs=0.08)


def test_adam_makes_the_logits_of_the_factor_in_the_init_grow_with_d_k(table):
    arms = table["scales"]
    assert arms["init"]["slope"][1] > arms["sqrt"]["slope"][1] + 0.05


def test_every_std_has_a_place(table):
    assert table["d_k"] == [16, 256] and table["steps"] == [0, 2]
    for arm in table["scales"].values():
        assert [len(row) for row in arm["std"]] == [2, 2] and len(arm["slope"]) == 2
