"""What a training run does not do, it refuses to be told."""

import numpy as np
import pytest

from experiments.config import ConfigError, Optim, from_dict
from experiments.step import learning_rates

NOT_OFFERED = [
    ("optim", "micro_batch", 4),
    ("optim", "warmup_steps", 4),
    ("data", "packing", True),
    ("data", "epochs", 2),
    ("model", "dropout", 0.1),
    ("model", "window", 8),
]


@pytest.mark.parametrize("table, key, value", NOT_OFFERED)
def test_what_is_not_offered_is_no_key_of_a_config(table, key, value):
    with pytest.raises(ConfigError, match=f"^unknown key '{table}.{key}'; "):
        from_dict({table: {key: value}})


@pytest.mark.parametrize("warmup, steps", [(4, 10), (1, 3), (0, 7), (3, 3)])
def test_rates_rise_to_the_peak_and_would_reach_zero_after_the_last(warmup, steps):
    """Update u of w that warm up has (u + 1) / w of the peak; none is wasted."""
    share = min(warmup / steps, 0.999)
    rates = learning_rates(Optim(lr=0.5, steps=steps, warmup_fraction=share))
    first = max(warmup, 1)
    rising = np.arange(1, first + 1) / first
    falling = 0.5 + 0.5 * np.cos(
        np.pi * np.arange(steps - first + 2) / (steps - first + 1)
    )
    want = np.concatenate([rising, falling[1:-1]])
    np.testing.assert_allclose(rates, 0.5 * want, rtol=1e-6)
    assert len(rates) == steps and rates.max() == 0.5 and rates.min() > 0
