"""How attention is computed; every algorithm has `attend(q, k, v, pairs, spec)`."""
