"""Layers with parameters, in Flax NNX."""

from jattn.nnx.axes import AXIS_NAMES as AXIS_NAMES
from jattn.nnx.blocks import DecoderBlock as DecoderBlock
from jattn.nnx.blocks import EncoderBlock as EncoderBlock
from jattn.nnx.config import TransformerConfig as TransformerConfig
from jattn.nnx.cross_block import BlockCache as BlockCache
from jattn.nnx.cross_block import EncoderDecoderBlock as EncoderDecoderBlock
from jattn.nnx.cross_block import Memory as Memory
from jattn.nnx.decoder import Decoder as Decoder
from jattn.nnx.embedding import Embedding as Embedding
from jattn.nnx.embedding import sinusoidal as sinusoidal
from jattn.nnx.encoder import Encoder as Encoder
from jattn.nnx.encoder_decoder import EncoderDecoder as EncoderDecoder
from jattn.nnx.feed_forward import FeedForward as FeedForward
from jattn.nnx.layers import stack_layers as stack_layers
from jattn.nnx.layers import unstack_layers as unstack_layers
from jattn.nnx.multi_head import MultiHeadAttention as MultiHeadAttention
