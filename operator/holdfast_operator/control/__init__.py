"""The control stream's server: heartbeats in, memberships out, and its certificates."""
