"""The gradient of the logits, of which only a norm for each query is kept."""

import jax
import jax.numpy as jnp

from jattn.algorithms.blockwise import attend_tiles, normaliser, tiled
from jattn.algorithms.cuts import Cut
from jattn.algorithms.tile_sum import tile_sum
from jattn.algorithms.tiling import Arrays
from jattn.core.product import product
from jattn.core.spec import AttentionSpec
from jattn.core.tile import Pairs


def score_gradient_rows(
    q: jax.Array,
    out_gradient: jax.Array,
    lse_gradient: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pairs: Pairs,
    spec: AttentionSpec,
) -> jax.Array:
    """The norm of the gradient of the logits of every query of one head.

    dL/ds = p (v dL/dout - out dL/dout + dL/dlse)

    Args:
        q: queries, (T, H).
        out_gradient: dL/dout, (T, D).
        lse_gradient: dL/dlse, (T, 1).
        k: keys, (S, H).
        v: values, (S, D).
        pairs: as in `attend`.
        spec: the static options.

    Returns:
        (T,).

    Source: Dao et al. 2022, arXiv:2205.14135, appendix B.2.
    """
    tiling, others, floats, plan = tiled(q, k, v, pairs, spec)
    out, shift, log_sum, *_ = attend_tiles(tiling, others, floats, plan)
    out_gradient = out_gradient.astype(out.dtype)
    less = jnp.sum(out * out_gradient, axis=1) - lse_gradient[:, 0]

    def squares(
        full: bool, i: jax.Array, j: jax.Array, tile: list[Arrays]
    ) -> tuple[jax.Array]:
        others, floats, (out_gradient, less, shift, log_sum) = tile
        _, _, v_t, pairs = tiling.operands(others, floats)
        s = tiling.logits(j, others, floats, full)
        p = jnp.exp(s - shift[:, None] - log_sum[:, None])
        dp = product("td,ds->ts", out_gradient, v_t, spec.dtype, spec.precision)
        ds = p * (pairs.kept(dp) - less[:, None])
        ds = ds if full else jnp.where(jnp.isneginf(s), 0, ds)
        return (tiling.own_rows(i, jnp.sum(ds**2, axis=1)),)

    of_rows = [out_gradient, less, *normaliser(shift, log_sum)]
    rows = Cut(queries=0)
    (total,) = tile_sum(
        squares,
        plan,
        tiling.grid,
        [others, floats, of_rows],
        [*tiling.cuts, [rows] * len(of_rows)],
        [rows],
    )
    return jnp.sqrt(total)
