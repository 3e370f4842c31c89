"""Clients: how one trains, is scored and answers."""
