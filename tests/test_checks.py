"""Settings of the claims that do not fit: refused before anything is trained."""

import pytest

from experiments.claims import explain, masks, order, prune, scale_variants, specialise
from experiments.claims.checks import check_text
from experiments.claims.on_text import OnText
from experiments.config import ConfigError, Data, Evaluation, Model
from experiments.data import load_corpus

MUCH = 10**9


@pytest.mark.parametrize(
    ("claim", "settings", "message"),
    [
        (explain, explain.Explain(windows=MUCH), f"windows = {MUCH} needs more text"),
        (prune, prune.Prune(tokens=MUCH), f"tokens = {MUCH} needs more text"),
        (order, order.Order(shuffled=MUCH), f"shuffled = {MUCH} needs more text"),
        (order, order.Order(model=Model(positions="none")), "each arm has its own"),
        (
            masks,
            masks.Masks(evaluation=Evaluation(tokens=MUCH)),
            f"evaluation.tokens = {MUCH} needs more text",
        ),
        (
            scale_variants,
            scale_variants.ScaleVariants(models=OnText(held_out=MUCH)),
            f"models.held_out = {MUCH} needs more text",
        ),
        (specialise, specialise.Specialise(tokens=MUCH), "needs more text"),
        (specialise, specialise.Specialise(heads=1), "heads = 1 must be at least 2"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_trained(
    claim, settings, message
):
    with pytest.raises(ConfigError, match=message):
        claim.measure(settings, None)


def test_the_part_that_is_too_short_is_named(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(97, 122)) * 40)  # 1000 bytes, a tenth is held out
    data = Data(source=str(path), batch=2, context=5)
    corpus = load_corpus(data.source)
    check_text(corpus, data, 90, "tokens = 90", ("train", "validation"))
    text = "tokens = 100 needs more text than the 100 tokens of the validation split"
    with pytest.raises(ConfigError, match=text):
        check_text(corpus, data, 100, "tokens = 100", ("train", "validation"))
