"""What the daemon shows: status of jobs, catalogue, counters, HTTP endpoints."""
