"""Figures of a machine with a GPU, each against a floor measured in the same run.

    python -m benchmarks.gpu.copying --out build/bench/copying.json

Each module measures one subject within about a minute, the most important figures first, and writes
its file again after each of them. Without a GPU, figures that need one are skipped by name
and the others are those of the CPU; `--small` measures little, to see that all of it runs.
"""
