"""Restoring a snapshot into the live state."""
