"""What `holdfast plan` computes: the cost of each policy for a job."""
