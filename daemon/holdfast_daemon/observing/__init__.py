"""What operators and dashboards see of the daemon: status, catalogue, counters, HTTP endpoints."""
