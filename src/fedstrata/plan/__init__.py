"""The ground: parts, plans, methods, streams, requests and replies."""
