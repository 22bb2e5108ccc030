"""The same numbers as torch, on the same inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, assert_gradient_close, exact

import jattn
from jattn import masks

pytestmark = pytest.mark.peer
torch = pytest.importorskip("torch")

B, T, S, N, K, H, D = 2, 7, 11, 6, 3, 5, 13
allowed = np.random.default_rng(0).random((B, N, T, S)) < 0.6
allowed[..., 0] = True
bias = exact(9, 1, N, T, S).astype(np.float32)

CASES = {
    "plain": ({}, {}, {}),
    "grouped heads": ({}, dict(enable_gqa=True), dict(K=K)),
    "causal": (dict(mask=masks.causal()), dict(is_causal=True), dict(S=T)),
    "causal, fewer queries": (
        dict(mask=masks.causal(), query_positions="start"),
        dict(is_causal=True),
        {},
    ),
    "Boolean mask": (dict(mask=allowed), dict(attn_mask=allowed), {}),
    "float bias": (dict(bias=bias), dict(attn_mask=bias), {}),
    "scale": (dict(scale=0.25), dict(scale=0.25), {}),
}


@pytest.mark.parametrize("algorithm", ["reference", "blockwise"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_torch(name, algorithm):
    ours, theirs, sizes = CASES[name]
    sizes = dict(K=N, S=S) | sizes
    shapes = (
        (B, T, N, H),
        (B, sizes["S"], sizes["K"], H),
        (B, sizes["S"], sizes["K"], D),
    )
    arrays = [exact(n, *shape).astype(np.float32) for n, shape in enumerate(shapes)]
    cotangent = exact(8, B, T, N, D).astype(np.float32)

    def attend(q, k, v):
        blocks = (4, 3) if algorithm == "blockwise" else None
        return jattn.attention(
            q, k, v, implementation=algorithm, block_sizes=blocks, **ours
        )

    out, pull = jax.vjp(attend, *map(jnp.asarray, arrays))
    gradients = pull(jnp.asarray(cotangent))

    tensors = [torch.tensor(x, requires_grad=True) for x in arrays]
    theirs = {
        option: torch.tensor(x) if isinstance(x, np.ndarray) else x
        for option, x in theirs.items()
    }
    heads_first = [x.transpose(1, 2) for x in tensors]
    want = torch.nn.functional.scaled_dot_product_attention(*heads_first, **theirs)
    want = want.transpose(1, 2)
    want.backward(torch.tensor(cotangent))
    assert_close(out, want.detach().numpy())
    for got, tensor in zip(gradients, tensors, strict=True):
        assert_gradient_close(got, tensor.grad.numpy())
