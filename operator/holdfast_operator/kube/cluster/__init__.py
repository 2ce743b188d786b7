"""Nodes and their daemons: which exist, which have room, and which are silent."""
