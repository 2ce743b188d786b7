"""Limits on the requests of callers."""
