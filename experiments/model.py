"""A small causal language model, a `jattn.nnx.Decoder`.

Pre-LN blocks, by default with rotary positions. The size of a key, d_k, depends on
nothing else and the size of a value is fixed, so that models of different d_k differ in
what the factor of the logits has to deal with, and in nothing else.

Source: Xiong et al. 2020, arXiv:2002.04745 (pre-LN); Su et al. 2021, arXiv:2104.09864.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from experiments.config import Model
from jattn.nnx import Decoder, TransformerConfig
from jattn.scores import Score, soft_cap

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""From query (B, T, N, H), key (B, T, N, H) and value (B, T, N, D) to (B, T, N, D)."""

# Of the computation; None: that of the parameters.
DTYPES = {"float32": None, "bfloat16": jnp.bfloat16}
# Made once: models of equal initialisers have one structure and share a compilation.
INITIALIZERS = {
    "lecun": nnx.initializers.lecun_normal(),
    "gpt2": nnx.initializers.normal(0.02),
}


def logit_scale(config: Model) -> float:
    """The factor of the dot products that `config.scale` stands for."""
    return {"sqrt": config.d_k**-0.5, "inv": 1 / config.d_k}.get(config.scale, 1.0)


class LogN(Score):
    """Scores times ln n / ln context, n being the keys that a query sees.

    So a query of a whole context keeps its scores, however long a text of a rolling
    window becomes.

    Source: Chiang & Cholak 2022, arXiv:2202.12172.
    """

    context: int

    def __call__(self, s: jax.Array, q_pos: Any, k_pos: Any) -> jax.Array:
        """The scores of a tile."""
        keys = jnp.clip(jnp.asarray(q_pos) + 1, 1, self.context)
        return s * (jnp.log(keys.astype(s.dtype)) / math.log(self.context))


class CausalLM(Decoder):
    """A decoder that has score rules of its own, whoever calls it.

    Args:
        config: of the decoder.
        cap: of the scores; 0: none.
        log_n: the context of `LogN`; 0: scores stay as they are.
        rngs: source of the random keys.
    """

    def __init__(
        self, config: TransformerConfig, *, cap: float, log_n: int, rngs: nnx.Rngs
    ):
        super().__init__(config, rngs=rngs)
        self.cap, self.log_n = cap, log_n

    @property
    def score(self) -> tuple[Score, ...]:
        """The rules, in the order in which they are applied."""
        first = (LogN(self.log_n),) if self.log_n else ()
        return (*first, soft_cap(self.cap)) if self.cap else first

    def __call__(self, tokens: Any, *args: Any, **options: Any) -> Any:
        """What the decoder gives for tokens, (B, T)."""
        return super().__call__(tokens, *args, score=self.score, **options)


def causal_lm(
    config: Model,
    *,
    vocabulary: int = 256,
    context: int = 64,
    param_dtype: Dtype = jnp.float32,
    rngs: nnx.Rngs,
) -> CausalLM:
    """The model, whose calls want `scale=logit_scale(config)`.

    As an argument of calls the factor is data: models that differ in it alone have one
    structure and share one compilation.

    Args:
        config: its settings.
        vocabulary: how many tokens there are.
        context: how many of them it sees at once: what `log_n` refers to, and how many
            learned positions there are.
        param_dtype: of the parameters.
        rngs: source of the random keys.
    """
    model = CausalLM(
        TransformerConfig(
            vocab_size=vocabulary,
            num_layers=config.layers,
            d_model=config.d_model,
            num_heads=config.heads,
            head_dim=config.d_k,
            v_head_dim=config.d_v,
            d_ff=config.d_ff,
            norm="layer",
            activation="gelu",
            qk_norm="layer" if config.qk_norm else None,
            positions=config.positions,
            max_length=context if config.positions == "learned" else None,
            tie_embeddings=False,
            dtype=DTYPES[config.dtype],
            param_dtype=param_dtype,
            kernel_init=INITIALIZERS[config.init],
        ),
        cap=config.soft_cap,
        log_n=context if config.log_n else 0,
        rngs=rngs,
    )
    if config.scale == "init":
        for block in model.blocks:
            for projection in (block.attention.query, block.attention.key):
                projection.kernel[...] *= config.d_k**-0.25
    return model


def logits_with(model: CausalLM, x: jax.Array, attend: Attend) -> jax.Array:
    """What the model predicts of embedded tokens if every layer attends so.

    Args:
        model: of pre-LN blocks.
        x: `model.embed(tokens)`, (B, T, d_model).
        attend: called once a layer, from the first on; mask, scale and score are its
            own.

    Returns:
        (B, T, vocabulary).
    """
    for block in model.blocks:
        vectors = block.attention.project(block.attention_norm(x))
        x = x + block.attention.out(attend(*vectors))
        x = x + block.feed_forward(block.feed_forward_norm(x))
    return model.head(model.norm(x))
