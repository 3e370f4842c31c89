"""Training between sites: what each of them is told, permits and reads."""
