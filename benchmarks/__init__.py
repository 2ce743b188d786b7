"""Costs of Holdfast as ratios to floors measured in the same run, beside its peers.

    python -m benchmarks.snapshot --size 1GiB --report build/bench/snapshot.json

Run from the repository's root. Must not: compare figures of different runs or machines.
"""
