"""Partial snapshots: choice of experts, their tokens, and gradients for peers."""
