"""Parity blocks: updated by changes, built from whole snapshots, and used to rebuild."""
