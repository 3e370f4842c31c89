"""One run: its stages, output folder and result."""
