"""What failures cost: effective training time of a job, by formula and by simulation."""
