"""Experts with uneven numbers of copies: their number, their places, and the tokens of each."""
