"""Taking a snapshot: plan, agreement of the ranks, the background thread."""
