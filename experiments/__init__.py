"""Experiments that test what is said about attention; run from the checkout."""
