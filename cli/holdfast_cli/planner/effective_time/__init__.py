"""The cost of failures: effective training time of a job, by formula and by simulation."""
