"""Layers with parameters, in Flax Linen."""

from jattn.linen.aliases import MultiHeadAttention as MultiHeadAttention
from jattn.linen.aliases import SelfAttention as SelfAttention
from jattn.linen.multi_head import (
    MultiHeadDotProductAttention as MultiHeadDotProductAttention,
)
