"""Layers with parameters, in Flax NNX."""

from jattn.nnx.attention import MultiHeadAttention as MultiHeadAttention
