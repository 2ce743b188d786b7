"""Jobs in a queue: their Workload."""
