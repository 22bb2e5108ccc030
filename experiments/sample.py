"""Text from a trained model, one byte after another."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.checkpoint import restore_parameters
from experiments.config import ConfigError
from experiments.model import CausalLM


def sample(
    run_directory: Path,
    prompt: bytes,
    *,
    tokens: int = 256,
    temperature: float = 0.8,
    seed: int = 0,
) -> bytes:
    """Continue a prompt.

    Every byte costs a full forward pass over the last `context` bytes, as many as the
    model was trained on. Of a longer prompt, only these are read.

    Args:
        run_directory: the directory of a training run.
        prompt: what to continue; at least one byte.
        tokens: number of bytes to add.
        temperature: divides the logits; 0 takes the most probable byte.
        seed: of the draws.

    Returns:
        The new bytes, without the prompt.

    Raises:
        ConfigError: an argument is impossible, or the directory holds no run.
    """
    if not prompt:
        raise ConfigError("the prompt is empty: give at least one byte")
    if tokens < 1:
        raise ConfigError(f"tokens must be at least 1, but got {tokens}")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature must be 0 or more, but got {temperature}")
    if seed < 0:
        raise ConfigError(f"seed must not be negative, but got {seed}")
    config, model = restore_parameters(run_directory)
    context = config.data.context
    rng = np.random.default_rng(seed)
    text = list(prompt)
    for _ in range(tokens):
        window = text[-context:]
        # Zeros fill the window up, so that one compiled function serves every length;
        # causality keeps them from the position that is read.
        padded = jnp.array([window + [0] * (context - len(window))], jnp.int32)
        logits = np.asarray(_logits(model, padded)[0, len(window) - 1], np.float64)
        text.append(_draw(logits, temperature, rng))
    return bytes(text[len(prompt) :])


@nnx.jit
def _logits(model: CausalLM, tokens: jax.Array) -> jax.Array:
    return model(tokens)


def _draw(logits: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    # The largest of logits / temperature + Gumbel noise is a draw from their softmax.
    return int((logits / temperature + rng.gumbel(size=logits.shape)).argmax())
