"""What attention leaves to `jax.checkpoint`: names for its output and log-sum-exp."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import print_saved_residuals

import jattn

NAMED = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")
NOTHING = jax.checkpoint_policies.nothing_saveable


def layer(implementation):
    def apply(x):
        h = jnp.tanh(x)
        options = dict(mask=jattn.masks.causal(), implementation=implementation)
        return jnp.tanh(jattn.attention(h, h, h, **options))

    return apply


def folds(policy):
    """How often the gradient of a layer runs the fold of blockwise over its tiles."""
    remat = jax.checkpoint(layer("blockwise"), policy=policy)
    gradient = jax.grad(lambda x: remat(x).sum())
    return str(jax.make_jaxpr(gradient)(jnp.ones((11, 1, 2)))).count("while[")


def test_a_policy_that_keeps_what_attention_names_does_not_run_it_again():
    assert 2 * folds(NAMED) == folds(NOTHING)


@pytest.mark.parametrize("name", ["attention_out", "attention_lse"])
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_output_and_log_sum_exp_have_names(implementation, name, capsys):
    def kept(policy):
        print_saved_residuals(
            jax.checkpoint(layer(implementation), policy=policy), jnp.ones((11, 1, 2))
        )
        return capsys.readouterr().out.splitlines()

    named = jax.checkpoint_policies.save_only_these_names(name)
    assert len(kept(named)) > len(kept(NOTHING))
