"""Defenses: clipping and noise, what they promise, and sums that hide the single messages."""
