"""Runs between sites: messages, their transport, and the programs at the server and at each site."""
