"""What holds of every call of attention, in random ones.

Every day 60 calls for each claim, the same each time; under `pytest -m deep` 2,000,
from a seed that the report's head shows and --hypothesis-seed sets.
"""

import jax
import jax.numpy as jnp
import numpy as np
from calling import compiled_laws, compiled_stats, compiled_tangents, has_pairs, holds
from oracle import assert_close, assert_gradient_close, assert_same_bits

from jattn.core.letters import letters_of
from jattn.masks import EMPTY, FULL, PARTIAL, Range


def assert_gradients_close(got, want, dtype, name):
    """Those of every array.

    That of a scale or of an array of a rule is a sum over all pairs, of the terms of
    which others are made too: it is as exact as the largest of them.
    """
    want, got = jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got)
    most = max(np.abs(np.float64(w)).max(initial=1.0) for _, w in want)
    for (path, w), g in zip(want, got, strict=True):
        what = f"{jax.tree_util.keystr(path)} of {name}"
        size = 1.0 if path[0].key in ("query", "key", "value") else most
        assert_gradient_close(np.float64(g) / size, np.float64(w) / size, dtype, what)


def assert_answers_close(got, want, dtype, name):
    """Outputs, log-sum-exps and gradients."""
    for g, w in zip(got[:2], want[:2], strict=True):
        assert_close(g, np.float64(w), dtype, name)
    assert_gradients_close(got[2], want[2], dtype, name)


@holds()
def test_every_algorithm_equals_dense_attention_in_float64(case):
    dtype, want = case.frame.dtype, case.true_answer()
    for blocks in case.algorithms:
        out, lse, _ = case.answer(blocks)
        assert (out.dtype, lse.dtype) == (dtype, case.frame.wide)
        assert_close(out, want[0], dtype, f"out of {blocks}")
        assert_close(lse, want[1], dtype, f"lse of {blocks}")


@holds()
def test_every_gradient_equals_that_of_dense_attention_in_float64(case):
    want = case.true_answer()[2]
    for blocks in case.algorithms:
        got = case.answer(blocks)[2]
        assert_gradients_close(got, want, case.frame.dtype, str(blocks))


def inner(x, y):
    """The inner product of two pytrees, and the size of what was added up.

    Each term is rounded on its own, relative to itself: so the sum is as exact as the
    root of the sum of their squares, not as the largest of them.
    """
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    terms = np.concatenate([(np.float64(a) * np.float64(b)).ravel() for a, b in pairs])
    return terms.sum(), max(np.linalg.norm(terms), 1.0)


@holds(has_pairs, 1)
def test_tangents_and_gradients_are_transposes_of_one_another(case):
    drawn, rng = case.draw(), np.random.default_rng(case.seed)
    tangents = jax.tree.map(
        lambda x: rng.standard_normal(x.shape).astype(x.dtype), drawn.floats
    )
    for blocks in case.algorithms:
        moved = case.run(compiled_tangents, blocks, drawn, tangents)
        forwards, size = inner(case.cotangents(), moved)
        backwards, _ = inner(case.answer(blocks)[2], tangents)
        dtype = case.frame.dtype
        assert_close(forwards / size, backwards / size, dtype, str(blocks))


@holds(lambda f: f.tree == "any")
def test_de_morgans_laws_and_double_negation_keep_every_bit(case):
    negated = case.draw(negated=True)
    for blocks in case.algorithms:
        got, want = case.answer(blocks, negated), case.answer(blocks)
        jax.tree.map(assert_same_bits, got, want)


@holds(has_pairs, 1)
def test_distributivity_keeps_every_bit(case):
    drawn = case.draw()
    rules = [rule for rule, _ in drawn.parts]
    for blocks in case.algorithms[1:]:
        a, b, c, d = case.run(compiled_laws, blocks, drawn, *rules)
        assert_same_bits(a, b)
        assert_same_bits(c, d)


@holds(has_pairs, 1)
def test_other_block_sizes_change_nothing(case):
    want, got = (case.answer(blocks) for blocks in case.frame.blocks)
    assert_answers_close(got, want, case.frame.dtype, str(case.frame.blocks))


@holds()
def test_the_same_call_gives_the_same_bits(case):
    for blocks in case.algorithms:
        jax.tree.map(assert_same_bits, case.answer(blocks), case.answer(blocks))


def permuted(tree, letter, order):
    """A rule, or a tuple of them, with the entries of `letter` in another order."""
    arrays, structure = jax.tree.flatten(tree)
    moved = []
    for x, letters in zip(arrays, letters_of(tree), strict=True):
        axis = letters.find(letter) - len(letters)
        is_full = letter in letters and x.shape[axis] != 1
        moved.append(np.take(x, order, axis) if is_full else x)
    return jax.tree.unflatten(structure, moved)


def reordered(floats, order):
    """The keywords with the keys in another order."""
    moved = dict(floats)
    for name in ("key", "value"):
        moved[name] = np.take(floats[name], order, -3)
    moved["score"] = permuted(floats["score"], "S", order)
    if "bias" in floats and floats["bias"].shape[-1] != 1:
        moved["bias"] = floats["bias"][..., order]
    return moved


@holds(lambda f: f.positions == "both" and "lengths" not in f.masks)
def test_keys_that_move_with_all_that_is_theirs_change_nothing(case):
    drawn = case.draw()
    order = np.random.default_rng(case.seed).permutation(case.frame.S)
    others = drawn.others | {
        "mask": permuted(drawn.others["mask"], "S", order),
        "key_positions": drawn.others["key_positions"][..., order],
    }
    moved = drawn._replace(floats=reordered(drawn.floats, order), others=others)
    for blocks in case.algorithms:
        *rows, gradients = case.answer(blocks)
        want = *rows, reordered(gradients, order)
        got = case.answer(blocks, moved)
        assert_answers_close(got, want, case.frame.dtype, str(blocks))


ABSOLUTE = {"prefix", "blocks", "chunked", "log_n"}


@holds(lambda f: f.positions == "both" and not ABSOLUTE & f.rules)
def test_positions_shifted_together_change_no_bit(case):
    drawn = case.draw()
    far = np.int32(np.random.default_rng(case.seed).integers(-(2**29), 2**29))
    shifted = {n: x + far for n, x in drawn.others.items() if "positions" in n}
    moved = drawn._replace(others=drawn.others | shifted)
    for blocks in case.algorithms:
        got, want = case.answer(blocks, moved), case.answer(blocks)
        jax.tree.map(assert_same_bits, got, want)


def per_vector(results):
    """out, lse and the gradients of query, key and value, (*B, T or S, N or K, ...)."""
    out, lse, gradients = results
    return out, lse, gradients["query"], gradients["key"], gradients["value"]


def large(x):
    """A number whose products overflow, of the dtype of an array."""
    return min(1e30, float(jnp.finfo(x.dtype).max))


@holds(lambda f: has_pairs(f) and f.batch not in ((), (1,)))
def test_a_batch_row_changes_no_bit_of_the_others(case):
    f = case.frame
    rng = np.random.default_rng(case.seed)
    row = np.unravel_index(rng.integers(np.prod(f.batch)), f.batch)
    other = ~np.isin(np.arange(np.prod(f.batch)), np.ravel_multi_index(row, f.batch))
    drawn, cotangents = case.draw(), case.cotangents()
    floats = dict(drawn.floats)
    for name in ("query", "key", "value"):
        floats[name] = floats[name].copy()
        floats[name][row] = rng.choice([np.nan, np.inf, large(floats[name]), 0.5])
    changed = tuple(x.copy() for x in cotangents)
    for x in changed:
        x[row] = 2
    for blocks in case.algorithms:
        got = case.answer(blocks, drawn._replace(floats=floats), changed)
        for g, w in zip(per_vector(got), per_vector(case.answer(blocks)), strict=True):
            g, w = (x.reshape(-1, *x.shape[len(f.batch) :])[other] for x in (g, w))
            assert_same_bits(g, w)


@holds(has_pairs)
def test_a_key_changes_no_bit_of_what_may_not_see_it(case):
    f = case.frame
    rng = np.random.default_rng(case.seed)
    drawn = case.draw()
    b = tuple(rng.integers(n) for n in f.batch)
    s, head = rng.integers(f.S), rng.integers(f.K)
    name = rng.choice(["key", "value"])
    floats = drawn.floats | {name: drawn.floats[name].copy()}
    much = large(floats[name])
    floats[name][(*b, s, head)] = rng.choice([np.nan, np.inf, -np.inf, much, -much])

    sees = np.moveaxis(drawn.allowed, -3, -2)  # (*B, T, N, S)
    group = slice(head * (f.N // f.K), (head + 1) * (f.N // f.K))
    rows = np.zeros(sees.shape[:-1], bool)
    rows[b][:, group] = sees[b][:, group, s]
    keys = np.zeros((*f.batch, f.S, f.K), bool)
    keys[b][:, head] = (sees[b][:, group] & rows[b][:, group, None]).any((0, 1))
    for blocks in case.algorithms:
        got = case.answer(blocks, drawn._replace(floats=floats))
        want = case.answer(blocks)
        touched = (rows, rows, rows, keys, keys)
        for g, w, x in zip(per_vector(got), per_vector(want), touched, strict=True):
            assert_same_bits(g[~x] + 0, w[~x] + 0)  # -0 is 0
        unseen = ~sees.reshape(*f.batch, f.T, f.K, -1, f.S).any((-4, -2))
        for x in per_vector(got)[3:]:
            assert not x[np.swapaxes(unseen, -1, -2)].any()


@holds(has_pairs, 1)
def test_statistics_and_output_are_those_of_the_weights(case):
    f = case.frame
    drawn = case.draw()
    for blocks in case.algorithms:
        results = case.run(compiled_stats, blocks, drawn)
        p, out, stats = jax.tree.map(np.float64, results)
        value = np.repeat(np.float64(drawn.floats["value"]), f.N // f.K, -2)
        want = np.einsum("...nts,...snd->...tnd", p, value)
        assert_close(out, want, f.dtype, f"out {blocks}")
        p = np.moveaxis(p, -3, -2)
        if f.sinks is not None:
            on_sink = np.exp(np.float64(drawn.floats["sinks"]) - stats.lse)
            p = np.concatenate([p, on_sink[..., None]], -1)
        logs = np.log(np.where(p == 0, 1, p))
        assert_close(stats.entropy, -np.sum(p * logs, -1), f.dtype, f"H {blocks}")
        assert_close(stats.max_prob, p.max(-1), f.dtype, f"max_prob {blocks}")
        assert_close(stats.sum_p2, np.sum(p**2, -1), f.dtype, f"sum_p2 {blocks}")
        top = np.exp(stats.max_logit - np.where(p.any(-1), stats.lse, 0))
        assert_close(top, p.max(-1), f.dtype, f"max_logit {blocks}")


def tile_of(mask, row, head, i, j):
    """The mask of one head of one batch row, for the queries i and the keys j."""
    arrays, structure = jax.tree.flatten(mask)
    at = {"N": (head,), "T": (i,), "S": (j,), "B": row, ".": (slice(None),)}
    tiles = []
    for x, letters in zip(arrays, letters_of(mask), strict=True):
        places = sum((at[letter] for letter in letters), ())
        whole = [slice(None) if isinstance(p, slice) else 0 for p in places]
        # An axis of 1 is the same for all.
        choice = zip(x.shape, places, whole, strict=False)
        tiles.append(x[tuple(w if n == 1 else p for n, p, w in choice)])
    return jax.tree.unflatten(structure, tiles)


@holds(has_pairs)
def test_a_verdict_is_never_wrong(case):
    f, drawn = case.frame, case.draw()
    rng = np.random.default_rng(case.seed)
    row, head = tuple(rng.integers(n) for n in f.batch), rng.integers(f.N)
    sizes = np.minimum(f.blocks[0], (f.T, f.S))
    starts = rng.integers((f.T, f.S) - sizes + 1)
    i, j = (slice(a, a + n) for a, n in zip(starts, sizes, strict=True))
    q, k = drawn.at.q[row][0, i], drawn.at.k[row][0, :, j]
    ranges = Range(q.min(), q.max()), Range(k.min(), k.max())
    for mask, meaning in [*drawn.parts, (drawn.others["mask"], drawn.allowed)]:
        allowed = np.broadcast_to(meaning, f.shape("BNTS"))
        pairs = allowed[row][head, i, j]
        tile = tile_of(mask.bind(f.T, f.S, f.N), row, head, i, j)
        got = np.broadcast_to(tile.allowed(q, k), pairs.shape)
        np.testing.assert_array_equal(got, pairs)
        verdict = int(tile.verdict(*ranges))
        assert verdict in (EMPTY, PARTIAL, FULL)
        assert verdict != EMPTY or not pairs.any(), mask
        assert verdict != FULL or pairs.all(), mask
