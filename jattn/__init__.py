"""Attention for JAX: any mask, any score rule, any derivative.

>>> import jax, jattn
>>> x = jax.random.normal(jax.random.key(0), (2, 5, 4, 8))  # (B, T, N, H)
>>> jattn.attention(x, x, x, mask=jattn.masks.causal()).shape
(2, 5, 4, 8)
"""

from jattn import diagnostics as diagnostics
from jattn import masks as masks
from jattn import rope as rope
from jattn import scores as scores
from jattn import testing as testing
from jattn.adapter import attention_fn as attention_fn
from jattn.cache import KVCache as KVCache
from jattn.compat import dot_product_attention as dot_product_attention
from jattn.core.letters import leaf as leaf
from jattn.core.rotary import rotary as rotary
from jattn.core.softmax import mask_scores as mask_scores
from jattn.core.softmax import masked_softmax as masked_softmax
from jattn.core.stats import Stats as Stats
from jattn.dispatch import attention as attention
from jattn.dispatch import attention_weights as attention_weights
from jattn.dispatch import scaled_scores as scaled_scores
from jattn.display import show as show
from jattn.explanation import Explanation as Explanation
from jattn.explanation import explain as explain
from jattn.tuning import tune as tune

__version__ = "0.1.0"
