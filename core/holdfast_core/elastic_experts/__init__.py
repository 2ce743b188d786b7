"""Experts with uneven numbers of copies: how many, where they lie, and which tokens go to which."""
