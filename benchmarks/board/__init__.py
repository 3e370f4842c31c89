"""The board: score against megabytes, from a protocol that is written down before its runs (configs/board)."""
