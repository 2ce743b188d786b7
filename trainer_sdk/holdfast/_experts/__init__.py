"""Partial snapshots: which experts, their tokens, and gradients for peers."""
