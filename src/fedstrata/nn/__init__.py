"""What BERT needs: models, local depth, the masked-only MLM head, batching."""
