"""What could be read in two ways, or not at all, is refused on every path."""

import functools

import chex
import jax
import numpy as np
import pytest
from paths import PATHS

import jattn

DIMS = chex.Dimensions(B=4, T=4, S=4, N=4, H=2)
X = np.zeros(DIMS["BTNH"], np.float32)
FUNCTIONS = {
    "attention": jattn.attention,
    "dot_product_attention": jattn.dot_product_attention,
    "attention_fn": jattn.attention_fn,
}
each_path = pytest.mark.parametrize("path", PATHS)
each_function = pytest.mark.parametrize("name", FUNCTIONS)


@pytest.mark.parametrize("letters", ["BS", "TS", "BTS", "NTS", "S"])
@each_path
def test_a_mask_whose_axes_may_be_others_is_not_guessed(path, letters):
    """All sizes are equal, so that only the number of axes can tell."""
    if path == "dot_product_attention" and letters == "S":
        letters = "TS"  # it documents that a mask may lack its first axes
    text = rf"mask.*must .*\(4{', 4' * (len(letters) - 1)},?\)"
    with pytest.raises(ValueError, match=text):
        PATHS[path](X, X, X, np.ones(DIMS[letters], bool))


@each_function
def test_a_boolean_bias_is_sent_to_mask(name):
    with pytest.raises(TypeError, match="bias must be floating.*bool.*mask="):
        FUNCTIONS[name](X, X, X, bias=np.ones(DIMS["BNTS"], bool))
    if name != "attention":  # by position, a mask comes after bias there
        with pytest.raises(TypeError, match="bias must be floating.*bool.*mask="):
            FUNCTIONS[name](X, X, X, np.ones(DIMS["BNTS"], bool))


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, bool])
@each_function
def test_vectors_that_are_no_floats_are_refused(name, dtype):
    x = X.astype(dtype)
    with pytest.raises(TypeError, match=rf"{name}: .*floating.*{np.dtype(dtype)}"):
        FUNCTIONS[name](x, x, x)


@each_function
def test_heads_where_the_length_belongs_are_named_if_the_sizes_can_tell(name):
    query, key = np.zeros((2, 6, 5, 3)), np.zeros((2, 4, 7, 3))  # (B, N, T, H)
    with pytest.raises(ValueError, match=r"N=5 and K=7.*swapaxes\(x, -3, -2\)"):
        FUNCTIONS[name](query, key, key)


@pytest.mark.parametrize("rate", [-0.5, float("nan"), 1.0, 1.5])
@pytest.mark.parametrize("name", ["attention", "attention_fn"])
def test_a_dropout_rate_that_is_no_share_is_refused(name, rate):
    with pytest.raises(ValueError, match=rf"dropout_rate must be in \[0, 1\).*{rate}"):
        call = functools.partial(FUNCTIONS[name], dropout_rate=rate)
        call(X, X, X, dropout_rng=jax.random.key(0))


@pytest.mark.parametrize("window", [-1, (-1, 0), (0, -2), (np.int32(-3), 1)])
def test_a_negative_window_is_not_taken_for_an_unbounded_one(window):
    with pytest.raises(ValueError, match="local_window_size must not be negative.*-"):
        jattn.dot_product_attention(X, X, X, local_window_size=window)
