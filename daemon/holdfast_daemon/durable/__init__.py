"""The daemon's side of the durable tier: writing ranks, finding sets and loading them."""
