"""Runs as tables, pictures and pages, from their records alone."""
