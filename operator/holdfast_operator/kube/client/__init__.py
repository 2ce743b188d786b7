"""Calls of the API server, watches, and what they are made of."""
