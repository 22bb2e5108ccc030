"""Models of one width: their sizes, what is refused, and that they are shared."""

import json

import jax
import pytest
from flax import nnx

from experiments.__main__ import main
from experiments.claims.one_width import OneWidth, config_of
from experiments.claims.run import answers_of
from experiments.evidence import HOLDS, OPEN, PART
from experiments.model import causal_lm

MODELS = OneWidth(d_model=48, layers=1, seeds=2, seed=5)


def test_models_of_any_number_of_heads_have_as_many_parameters():
    sizes = set()
    for heads in (1, 2, 4, 24):
        config = config_of(MODELS, heads, seed=7).model
        assert config.d_k == config.d_v == 48 // heads and config.d_ff == 192
        model = nnx.eval_shape(lambda c=config: causal_lm(c, rngs=nnx.Rngs(0)))
        leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
        sizes.add(sum(x.size for x in leaves))
    assert len(sizes) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiler")
def test_experiments_share_their_models(tmp_path):
    def outcomes(name, *args):
        small = ["--models.d-model", "16", "--models.layers", "1", "--models.seeds"]
        small += ["1", "--models.optim.steps", "20", "--models.data.batch", "8", *args]
        command = [name, f"configs/{name}.toml", "--out", str(tmp_path), *small]
        assert main(command) == 0
        return [answer.outcome for answer in answers_of(tmp_path / name)]

    assert outcomes("heads", "--counts", "1", "4", "--rounds", "2")[2] in (PART, HOLDS)
    made = set((tmp_path / "models").iterdir())
    assert len(made) == 2
    several = ("--heads", "4", "--tokens", "512")
    removals, looks = outcomes("prune", *several), outcomes("specialise", *several)
    assert removals[1] == looks[0] == OPEN  # of one seed nothing is said
    assert set((tmp_path / "models").iterdir()) == made
    found = json.loads((tmp_path / "prune" / "results.json").read_text())["results"]
    orders = [order for x in found["runs"][0]["after"].values() for order in x]
    assert len(orders) == 8 and len({order[-1] for order in orders}) == 1
