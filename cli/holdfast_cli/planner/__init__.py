"""`holdfast plan` and `holdfast simulate`: the needs of a job, and the cost of failures."""
