"""What a transformer is made of, apart from its numbers."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer

from jattn.core.rotary import rotary
from jattn.layer import Rope
from jattn.nnx.option_kinds import GATED, SIZES, check_kinds

Policy = Callable[..., Any]


def of_kernels(*args: Any, **kwargs: Any) -> jax.Array:
    """`flax.nnx.initializers.lecun_normal`, as a function that can be pickled."""
    return nnx.initializers.lecun_normal()(*args, **kwargs)


def of_embeddings(*args: Any, **kwargs: Any) -> jax.Array:
    """A normal of variance 1 / d_model, likewise."""
    scaled = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
    return scaled(*args, **kwargs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The static options of `Encoder`, `Decoder`, `EncoderDecoder` and their blocks.

    The defaults are those of a small modern language model: pre-LN, RMSNorm, SwiGLU,
    rotary positions, no biases, tied embeddings. That of Vaswani et al. is

        TransformerConfig(
            vocab_size=..., num_layers=6, d_model=512, num_heads=8, norm="layer",
            norm_first=False, activation="relu", positions="sinusoidal",
            dropout_rate=0.1, use_bias=True,
        )

    Args:
        vocab_size: number of tokens.
        num_layers: number of blocks.
        d_model: width of the residual stream.
        num_heads: N.
        num_kv_heads: K, which must divide N; default N.
        head_dim: H, also called d_k; default d_model / N.
        v_head_dim: D, the width of a value; default H.
        d_ff: width inside the feed-forward network; default 4 d_model, and with a gate,
            which is a third matrix, 8/3 d_model rounded up to a multiple of 8.
        norm: "rms" (RMSNorm) or "layer" (LayerNorm).
        norm_first: True is pre-LN, x + f(norm(x)), with a norm after the last block;
            False is post-LN, norm(x + f(x)).
        norm_epsilon: what a norm adds to the variance.
        activation: "gelu" (its tanh form), "relu" or "silu"; with a gate "swiglu",
            "geglu" or "reglu".
        positions: "rotary" turns queries and keys, "learned" and "sinusoidal" add to
            the embeddings, "none" leaves order to the mask.
        rope: which rotary embedding, `rope(x, positions)`; default `jattn.rotary`.
        max_length: number of learned positions.
        qk_norm: normalises queries and keys: "layer", "rms" or "l2".
        sinks: whether each head has a learned logit that takes weight from the keys.
        use_bias: whether projections and LayerNorms have biases.
        tie_embeddings: whether the logits are dot products with the embeddings.
        scale_embeddings: whether embeddings are multiplied by sqrt(d_model); default
            with sinusoidal positions, which would drown them.
        dropout_rate: of embeddings, of what is added to the residual stream, and of
            attention weights.
        dtype: of the computation; default param_dtype. Norms, softmax and logits are
            float32 at least.
        param_dtype: of the parameters.
        kernel_init: initialiser of kernels.
        out_kernel_init: of the kernels that end in the residual stream; default
            kernel_init.
        embedding_init: of embeddings.
        remat: True recomputes each block in the backward pass; a policy of
            `jax.checkpoint_policies` says what is kept. Attention's output is named
            "attention_out" and its log-sum-exp "attention_lse".
        scan_layers: whether the blocks are one, with stacked parameters, whose compile
            time does not grow with depth; with a cache it does, as each has its own,
            which is updated in place.

    A config is a value: it has a hash, and can be pickled if its functions can. Those
    that `flax.nnx.initializers` and `jax.checkpoint_policies` return cannot.

    Raises:
        ValueError: sizes are not positive or do not divide, a name is unknown, or an
            option would be ignored.
        TypeError: an option is of another kind than those above.

    Source: Vaswani et al. 2017, arXiv:1706.03762; Xiong et al. 2020, arXiv:2002.04745
        (pre-LN); Zhang & Sennrich 2019, arXiv:1910.07467 (RMSNorm); Shazeer 2020,
        arXiv:2002.05202 (gates); Press & Wolf 2017, arXiv:1608.05859 (tying).

    Example:
        >>> config = TransformerConfig(vocab_size=256, d_model=96, num_heads=4)
        >>> config.head_dim is None
        True
        >>> config.resolve().head_dim, config.resolve().d_ff
        (24, 256)
    """

    vocab_size: int
    num_layers: int = 8
    d_model: int = 512
    num_heads: int = 8
    num_kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    d_ff: int | None = None
    norm: Literal["rms", "layer"] = "rms"
    norm_first: bool = True
    norm_epsilon: float = 1e-6
    activation: Literal["gelu", "relu", "silu", "swiglu", "geglu", "reglu"] = "swiglu"
    positions: Literal["rotary", "learned", "sinusoidal", "none"] = "rotary"
    rope: Rope | None = None
    max_length: int | None = None
    qk_norm: Literal["layer", "rms", "l2"] | None = None
    sinks: bool = False
    use_bias: bool = False
    tie_embeddings: bool = True
    scale_embeddings: bool | None = None
    dropout_rate: float = 0.0
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = of_kernels
    out_kernel_init: Initializer | None = None
    embedding_init: Initializer = of_embeddings
    remat: bool | Policy = False
    scan_layers: bool = False

    def __post_init__(self) -> None:
        check_kinds(self)
        self._check_positions()
        sizes = {name: getattr(self, name) for name in SIZES} | self._defaults()
        if self.num_heads % sizes["num_kv_heads"]:
            raise ValueError(
                "TransformerConfig: num_heads must be a multiple of num_kv_heads, but "
                f"got num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}. "
                "Give each key head the same number of query heads."
            )

    def resolve(self) -> "TransformerConfig":
        """The same with every default that depends on other options written out.

        They are written late so that `dataclasses.replace` moves them too.
        """
        return dataclasses.replace(self, **self._defaults())

    def _defaults(self) -> dict[str, Any]:
        """What options that were left out follow from."""
        gated, width = self.activation in GATED, self.d_model
        head_dim = self._divided() if self.head_dim is None else self.head_dim
        defaults = dict(
            num_kv_heads=self.num_heads,
            head_dim=head_dim,
            v_head_dim=head_dim,
            d_ff=-(-width // 3) * 8 if gated else 4 * width,
            rope=rotary if self.positions == "rotary" else None,
            scale_embeddings=self.positions == "sinusoidal",
            dtype=self.param_dtype,
            out_kernel_init=self.kernel_init,
        )
        return {x: y for x, y in defaults.items() if getattr(self, x) is None}

    def _divided(self) -> int:
        if self.d_model % self.num_heads:
            raise ValueError(
                "TransformerConfig: num_heads must divide d_model, but got num_heads="
                f"{self.num_heads}, d_model={self.d_model}. Or give head_dim."
            )
        return self.d_model // self.num_heads

    def _check_positions(self) -> None:
        if self.rope is not None and self.positions != "rotary":
            raise ValueError(
                'TransformerConfig: rope is used with positions="rotary" only, but got '
                f"positions={self.positions!r}, rope={self.rope}. Leave one out."
            )
        if (self.max_length is None) == (self.positions == "learned"):
            raise ValueError(
                "TransformerConfig: max_length is the number of learned positions, but "
                f"got positions={self.positions!r}, max_length={self.max_length}. "
                'Give it with positions="learned", and only then.'
            )
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise ValueError(
                "TransformerConfig: sinusoidal positions need an even d_model, but got "
                f"d_model={self.d_model}. Each frequency fills two channels."
            )
