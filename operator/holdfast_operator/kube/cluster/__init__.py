"""Nodes and daemons: what there is, who has room, who is silent."""
