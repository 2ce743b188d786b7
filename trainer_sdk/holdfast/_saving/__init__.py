"""Saving of snapshots: plan, agreement of the ranks, the background thread."""
