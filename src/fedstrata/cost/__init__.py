"""What a run costs: bytes and FLOPs as pure functions of plans and shapes, and the measured ledger."""
