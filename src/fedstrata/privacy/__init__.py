"""What keeps a client's message from being read: integers that can be summed behind masks."""
