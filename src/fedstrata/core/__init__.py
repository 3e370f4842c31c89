"""The engine: parts, plans, rounds, clients, the server. It never names a method."""
