"""Generation: every token is drawn from the logits of the whole forward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from experiments.config import ConfigError, Model
from experiments.draw import Drawing, draw, keys_of
from experiments.model import causal_lm
from experiments.progress import Silent
from experiments.sample import EVERY, STRIDE, generate
from jattn.nnx import Decoder, TransformerConfig

pytestmark = pytest.mark.usefixtures("quick_compiler")
SIZES = Model(layers=2, d_model=12, heads=3, d_k=6, d_v=5, d_ff=14)
CONTEXT = 11
PROMPTS = [b"ab", b"the quick", b"x"]
TOKENS = STRIDE + 5  # the second stride is not a whole one
SCALE = 0.7
GREEDY = Drawing(0, EVERY, 1.0)


def make():
    """A model of random numbers; nothing has to be compiled for them."""
    model = nnx.eval_shape(lambda: causal_lm(SIZES, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(model)
    rng = np.random.default_rng(0)

    def fill(x):
        return jnp.float32(rng.normal(scale=0.6, size=x.shape))

    return graph, jax.tree.map(fill, params)


GRAPH, PARAMS = make()


def continued(prompts=PROMPTS, params=PARAMS, **options):
    options = dict(max_new_tokens=TOKENS, context=CONTEXT, scale=SCALE) | options
    return generate(nnx.merge(GRAPH, params), prompts, **options)


@jax.jit
def forward(params, tokens, window):
    mask = jattn.masks.sliding_window(window - 1)
    return nnx.merge(GRAPH, params)(tokens, mask=mask, scale=SCALE)


@jax.jit
def draw_each(rng, logits, drawing):
    """Token after token, from the logits of each, (T, V)."""
    rngs = jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(len(logits)))
    return jax.vmap(draw, (0, 0, None))(rngs, logits, drawing)


def logits_of(texts, window=CONTEXT):
    """What each token after PROMPTS is drawn from, by one pass over all of the text."""
    tokens = np.zeros((3, 9 + TOKENS), np.int32)
    for row, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        tokens[row, : len(prompt) + TOKENS] = [*prompt, *text]
    logits = np.asarray(forward(PARAMS, tokens, np.int32(window)))
    return [x[len(p) - 1 :][:TOKENS] for p, x in zip(PROMPTS, logits, strict=True)]


class Listening(Silent):
    """Keeps what it is told."""

    def __init__(self):
        self.told = []

    def start(self, description, total):
        self.told.append(total)

    def update(self, step, **numbers):
        self.told.append(step)

    def finish(self, message):
        self.told.append(message.split(" tokens, ")[0])


def test_a_greedy_text_is_the_argmax_of_the_forward_pass_beyond_the_context():
    texts = continued(drawing=GREEDY)
    for text, logits in zip(texts, logits_of(texts), strict=True):
        second, first = np.sort(logits, -1)[:, -2:].T
        assert (first - second).min() > 1e-4  # nothing is decided by rounding
        assert text == logits.argmax(-1).tolist()
    narrower = logits_of(texts, CONTEXT - 1)
    assert texts != [x.argmax(-1).tolist() for x in narrower]


def test_every_token_is_drawn_by_its_own_key():
    drawing = Drawing(1.3, 40, 0.9)
    texts = continued(drawing=drawing, seed=3)
    rngs = keys_of(PROMPTS, 3)
    for text, rng, logits in zip(texts, rngs, logits_of(texts), strict=True):
        assert text == draw_each(rng, logits, drawing).tolist()


def test_a_text_depends_on_its_prompt_and_the_seed_and_not_on_other_prompts():
    texts = continued(seed=3)
    others = continued([b"the quick", b"something", b"ab"], seed=3)
    assert others[::2] == texts[1::-1]
    assert continued(seed=4)[1] != texts[1]
    twice = continued([b"the quick"] * 3, seed=3)
    assert twice[0] == texts[1] and len(set(map(tuple, twice))) == 3


def test_a_row_ends_with_its_stop_and_the_others_go_on():
    texts = continued(seed=3)
    stop = texts[0][STRIDE // 2]
    want = [x[: x.index(stop) + 1] if stop in x else x for x in texts]
    assert len(want[0]) <= STRIDE and max(map(len, want)) == TOKENS
    assert continued(seed=3, stop=stop) == want
    first = continued([b"the quick"] * 3, drawing=GREEDY)[0][0]
    listening = Listening()
    options = dict(drawing=GREEDY, stop=first, progress=listening)
    assert continued([b"the quick"] * 3, **options) == [[first]] * 3
    assert listening.told == [TOKENS, STRIDE, "3"]  # and no second stride


def test_progress_counts_steps_and_the_tokens_of_all_rows():
    listening = Listening()
    continued(progress=listening)
    assert listening.told == [TOKENS, STRIDE, TOKENS, str(3 * TOKENS)]


@pytest.mark.slow
def test_without_a_context_a_token_may_attend_to_all():
    texts = continued(context=None, drawing=GREEDY)
    want = [x.argmax(-1).tolist() for x in logits_of(texts, 1000)]
    assert texts == want != continued(drawing=GREEDY)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([b""], {}, "the prompt is empty: give at least one token"),
        ([b"x", b""], {}, "prompt 2 of 2 is empty"),
        ([b"x" * 12], {}, "has 12 tokens, but the model was trained on 11 at once"),
        ([[256]], {}, "has a token that is not below 256"),
        ([[-1]], {}, "has a token that is not below 256"),
        ([b"x"], {"max_new_tokens": 0}, "tokens must be at least 1, but got 0"),
        ([b"x"], {"drawing": GREEDY._replace(top_k=0)}, "top_k must be at least 1"),
        ([b"x"], {"seed": -1}, r"seed must be from 0 to 2\*\*31 - 1, but got -1"),
    ],
)
def test_what_cannot_be_continued_is_refused(prompts, options, message):
    with pytest.raises(ConfigError, match=message):
        continued(prompts, **options)


def test_a_text_ends_where_learned_positions_do():
    config = TransformerConfig(
        vocab_size=256, d_model=12, num_heads=3, positions="learned", max_length=20
    )
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    with pytest.raises(ConfigError, match="20 learned positions, .* take 21: ask for"):
        generate(model, PROMPTS, max_new_tokens=12)


def test_a_model_that_gives_nan_is_refused():
    broken = jax.tree.map(lambda x: x * np.nan, PARAMS)
    with pytest.raises(ConfigError, match="are NaN: its training diverged"):
        continued(params=broken)


def test_no_prompt_has_no_text():
    assert continued([]) == []
