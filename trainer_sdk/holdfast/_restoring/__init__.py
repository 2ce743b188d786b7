"""Restoring of a snapshot into the live state."""
