"""`holdfast simulate`: the same failures under each policy."""
