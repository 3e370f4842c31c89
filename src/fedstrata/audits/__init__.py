"""What a server can read from what one client sends: a client's round played, and attacked."""
