"""What a snapshot captures, by the job's policy, and what is lost by it."""
