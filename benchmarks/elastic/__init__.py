"""Uneven copies of experts beside expert parallelism; see `__main__`."""
