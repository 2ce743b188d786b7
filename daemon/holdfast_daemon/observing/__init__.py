"""The daemon as operators and dashboards see it: status, catalogue, counters, HTTP endpoints."""
