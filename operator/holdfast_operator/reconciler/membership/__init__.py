"""Who takes part: who leaves, who waits, who joins where, and when an epoch begins."""
