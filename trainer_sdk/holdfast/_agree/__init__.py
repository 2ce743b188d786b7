"""Agreement of the ranks of a training world: what they exchange, and what follows for all."""
