"""Launch of workers: the torchrun agent, its rendezvous and the workers' processes."""
