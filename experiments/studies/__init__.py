"""The tasks, models and measures of the experiments about claims: pure functions."""
