"""The torchrun agent, its rendezvous and the workers' processes."""
