"""Rows from files, cut into tokens, and dealt to the clients."""
