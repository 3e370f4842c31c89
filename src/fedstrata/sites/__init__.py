"""Clients in places of their own: messages, transport, programs."""
