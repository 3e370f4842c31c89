"""The server: the round loop, the merge, its state."""
