"""Snapshots: units, layouts and shards, with their names, storage and reports."""
