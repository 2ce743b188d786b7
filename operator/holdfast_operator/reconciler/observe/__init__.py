"""What the reconciler knows: its present observation, and its memory."""
