"""Channels, certificates, and how long these are valid."""
