"""A job on this node: its engine's host, and the worker that carries out effects."""
