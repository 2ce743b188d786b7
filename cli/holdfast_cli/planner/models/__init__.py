"""Computations of `holdfast plan`: the cost of each policy for a job."""
