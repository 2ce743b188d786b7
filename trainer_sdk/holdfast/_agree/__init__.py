"""Agreement of the ranks of a training world: exchanges, and conclusions that all ranks share."""
