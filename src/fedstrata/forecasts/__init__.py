"""What a run will cost, told before it."""
