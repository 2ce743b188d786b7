"""Training state: the tensors, and everything else worth saving."""
