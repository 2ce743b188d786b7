"""Survival of losses: parity groups, codes, their memory, and the recovery line."""
