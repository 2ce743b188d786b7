"""Requests to the API server, watches, and the values they use."""
