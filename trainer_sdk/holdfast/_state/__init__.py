"""The training state: which tensors there are, and everything else worth saving."""
