"""Text from a language model: the prompts are read at once, then token by token.

Keys and values are kept, so that a token costs one position of the model. Attention of
a model with a context sees as many tokens as that, at any length of text: the window
rolls on.
"""

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.checkpoint import restore_parameters
from experiments.config import ConfigError
from experiments.draw import Drawing, check, draw, keys_of
from experiments.model import logit_scale
from experiments.progress import Progress, Silent
from experiments.tokens import of_run
from jattn.nnx import Decoder

STRIDE = 32  # tokens between looks at how far it is
EVERY = 2**31 - 1  # top_k that leaves no token out


def sample(
    run_directory: Path, prompts: Sequence[bytes], **options: Any
) -> list[bytes]:
    """Continue prompts with the model of a training run.

    Args:
        run_directory: the directory of the run.
        prompts: what to continue, each of at least one token and at most as many as
            the model was trained on at once.
        **options: of `generate`.

    Returns:
        The new bytes of each, without the prompt.

    Raises:
        ConfigError: an argument is impossible, or the directory holds no run.
    """
    config, model = restore_parameters(run_directory)
    scale, context = logit_scale(config.model), config.data.context
    tokenizer = of_run(run_directory, config.data)
    read = [tokenizer.encode(prompt).tokens.tolist() for prompt in prompts]
    drawn = generate(model, read, scale=scale, context=context, **options)
    return [tokenizer.decode_after(*both) for both in zip(read, drawn, strict=True)]


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    drawing: Drawing = Drawing(1.0, EVERY, 1.0),
    *,
    max_new_tokens: int = 256,
    seed: int = 0,
    stop: int | None = None,
    scale: float | None = None,
    context: int | None = None,
    progress: Progress | None = None,
) -> list[list[int]]:
    """Continue prompts, all at once.

    What is drawn for a prompt depends on the prompt, the seed, and how many of the
    prompts before it are the same; not on the others.

    Args:
        model: a causal language model.
        prompts: tokens, at least one each; of any lengths.
        drawing: how the next token is drawn; by default from all there are.
        max_new_tokens: tokens to add to each.
        seed: of the draws.
        stop: a token that is the last of its row.
        scale: factor of the dot products, as in the model's calls.
        context: how many tokens a token may attend to, itself the last, at any length
            of text, and how many a prompt may have; None: all.
        progress: where to say how far it is.

    Returns:
        The new tokens of each prompt.

    Raises:
        ConfigError: an argument is impossible, or the model gives NaN.
    """
    lengths = _check_prompts(prompts, context, model.config.vocab_size)
    temperature, top_k, top_p = drawing
    if max_new_tokens < 1:
        raise ConfigError(f"tokens must be at least 1, but got {max_new_tokens}")
    check(drawing, seed)
    if not prompts:
        return []
    longest = max(lengths)
    _check_positions(model, longest + max_new_tokens)
    progress = Silent() if progress is None else progress
    progress.start("sample", max_new_tokens)
    tokens = np.zeros((len(prompts), longest), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = list(prompt)
    capacity = longest + (max_new_tokens if context is None else context - 1)
    graph, params = nnx.split(model)
    sizes = dict(capacity=capacity, window=context)
    state = _read(graph, params, tokens, jnp.asarray(lengths), scale, **sizes)
    write = functools.partial(
        _write,
        graph,
        params,
        rngs=keys_of(prompts, seed),
        drawing=Drawing(float(temperature), top_k, float(top_p)),
        stop=-1 if stop is None else stop,
        scale=scale,
    )
    drawn = _in_strides(write, state, max_new_tokens, progress)
    return [[int(x) for x in row if x >= 0] for row in drawn]


class _State(NamedTuple):
    """Where generation is.

    Attributes:
        cache: of the tokens so far.
        logits: of the next token, (B, V).
        going: which rows have not ended, (B,).
        step: how many tokens were drawn.
    """

    cache: Any
    logits: jax.Array
    going: jax.Array
    step: jax.Array


@functools.partial(jax.jit, static_argnames=("graph", "capacity", "window"))
def _read(
    graph: Any,
    params: Any,
    tokens: jax.Array,
    lengths: jax.Array,
    scale: float | None,
    *,
    capacity: int,
    window: int | None,
) -> _State:
    """The state after the prompts, (B, T), padded on the right."""
    model = nnx.merge(graph, params)
    cache = model.init_cache(len(tokens), capacity, window=window)
    logits, cache = model(tokens, cache=cache, lengths=lengths, scale=scale)
    last = jnp.take_along_axis(logits, lengths[:, None, None] - 1, axis=1)[:, 0]
    return _State(cache, last, jnp.ones(len(tokens), bool), jnp.int32(0))


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="state")
def _write(
    graph: Any,
    params: Any,
    state: _State,
    *,
    rngs: jax.Array,
    drawing: Drawing,
    stop: int,
    scale: float | None,
    limit: int,
) -> tuple[_State, jax.Array]:
    """`limit` steps on; with the tokens, (B, STRIDE), -1 where a row had ended."""

    def step(column: jax.Array, carry: tuple[_State, jax.Array]) -> Any:
        (cache, logits, going, step), drawn = carry
        own = jax.vmap(jax.random.fold_in, (0, None))(rngs, step)
        token = jax.vmap(draw, (0, 0, None))(own, logits, drawing)
        drawn = drawn.at[:, column].set(jnp.where(going, token, -1))
        model = nnx.merge(graph, params)
        logits, cache = model(
            token[:, None], cache=cache, lengths=going.astype(int), scale=scale
        )
        going &= token != stop
        return _State(cache, logits[:, 0], going, step + 1), drawn

    none = jnp.full((len(state.going), STRIDE), -1)
    return jax.lax.fori_loop(0, limit, step, (state, none))


def _in_strides(
    write: Callable[..., tuple[_State, jax.Array]],
    state: _State,
    max_new_tokens: int,
    progress: Progress,
) -> np.ndarray:
    """The new tokens, a row for each prompt, -1 where it had ended."""
    drawn: list[np.ndarray] = []
    state, _ = jax.block_until_ready(write(state, limit=0))  # compiles
    began, count = time.perf_counter(), 0
    for done in range(0, max_new_tokens, STRIDE):
        if not np.any(state.going):
            break
        limit = min(STRIDE, max_new_tokens - done)
        state, new = write(state, limit=limit)
        if np.isnan(state.logits).any():
            raise ConfigError("the logits of the model are NaN: its training diverged")
        drawn.append(np.asarray(new))
        count += int((drawn[-1] >= 0).sum())
        speed = count / (time.perf_counter() - began)
        progress.update(done + limit, tokens_per_second=speed)
    progress.finish(f"{count} tokens, {speed:,.0f} per second")
    return np.concatenate(drawn, axis=1)


def _check_prompts(
    prompts: Sequence[Sequence[int]], context: int | None, vocabulary: int
) -> list[int]:
    """Their lengths."""
    for number, prompt in enumerate(prompts, start=1):
        which = (
            f"prompt {number} of {len(prompts)}" if len(prompts) > 1 else "the prompt"
        )
        if not len(prompt):
            raise ConfigError(f"{which} is empty: give at least one token")
        if context is not None and len(prompt) > context:
            raise ConfigError(
                f"{which} has {len(prompt)} tokens, but the model was trained on "
                f"{context} at once: give its last {context}"
            )
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise ConfigError(f"{which} has a token that is not below {vocabulary}")
    return [len(prompt) for prompt in prompts]


def _check_positions(model: Decoder, length: int) -> None:
    learned = model.config.max_length
    if learned is not None and length > learned:
        raise ConfigError(
            f"the model has {learned} learned positions, but prompt and new tokens "
            f"take {length}: ask for fewer tokens"
        )
