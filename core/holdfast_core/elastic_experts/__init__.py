"""Experts with uneven numbers of copies: how many there are, and where they lie."""
