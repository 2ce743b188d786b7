"""The daemon's side of the durable tier: write ranks, find sets, load them."""
