"""What the reconciler knows: what is observed now, and what it remembers."""
