"""Savings and risks of partial snapshots, computed from captured units; see `__main__`."""
