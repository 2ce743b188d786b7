"""Mixture-of-Experts layers whose experts have uneven numbers of copies."""
