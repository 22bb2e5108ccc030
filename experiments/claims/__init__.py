"""One experiment for each thing that is said about attention; `claim.Claim` says how.

Names are listed here, so that the command line knows them without importing JAX.
"""

NAMES = {
    "reversal": "Cross-attention learns to read a sequence backwards.",
    "padding": "Padding of an encoder's batch changes nothing.",
}
"""Every experiment and what it asks."""
