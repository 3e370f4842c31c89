"""Models: their parts, checkpoints, heads, cuts."""
