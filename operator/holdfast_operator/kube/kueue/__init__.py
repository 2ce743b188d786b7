"""Jobs in a queue of Kueue, and their Workloads."""
