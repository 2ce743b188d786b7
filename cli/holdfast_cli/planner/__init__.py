"""`holdfast plan` and `holdfast simulate`: what a job will need, lose and gain."""
