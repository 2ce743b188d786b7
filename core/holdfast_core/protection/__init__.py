"""What survives a loss: parity groups, codes, the memory they take, the recovery line."""
