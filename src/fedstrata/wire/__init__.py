"""The form of tensors between client and server."""
