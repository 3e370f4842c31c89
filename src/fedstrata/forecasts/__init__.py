"""What a run will cost, computed before it."""
