"""Layers of experts with other dispatchers than ours, to compare with."""
