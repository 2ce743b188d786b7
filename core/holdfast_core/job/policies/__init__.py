"""Snapshot policies: one module each, and the list of them in `registered`."""
