"""Functions that stand in the place of others', under their names."""

from jattn.compat.jax_nn import dot_product_attention as dot_product_attention
