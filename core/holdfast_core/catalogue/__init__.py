"""What daemons publish about jobs for readers, and what readers make of it."""
