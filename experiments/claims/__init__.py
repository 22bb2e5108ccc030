"""One experiment for each thing that is said about attention; `claim.Claim` says how.

Names are listed here, so that the command line knows them without importing JAX.
"""

NAMES = {
    "memory": "Exact attention needs no memory for pairs of tokens.",
    "order": "Self-attention does not see the order of tokens.",
    "collapse": "Attention alone makes all tokens equal.",
    "scale_variants": "Dot products need the factor 1/sqrt(d_k).",
    "stability": "Logits grow, unless normalised or capped.",
    "long_context": "Attention spreads thin over a long context.",
    "recall": "Attention recalls what a recurrent state forgets.",
    "heads": "Several heads are better than one, and cost no more.",
    "prune": "Many heads can be taken away.",
    "specialise": "Heads specialise.",
    "reversal": "Cross-attention learns to read a sequence backwards.",
    "masks": "A mask in the wrong place would be noticed.",
    "explain": "Attention weights explain a prediction.",
    "padding": "Padding of an encoder's batch changes nothing.",
}
"""Every experiment and what it asks."""
