"""Layers with parameters, in Flax NNX."""

from jattn.nnx.multi_head import MultiHeadAttention as MultiHeadAttention
