"""The durable tier: generations as files that any tool can read, in any storage fsspec reaches.

Daemons write and load whole ranks through it; trainers and tools read tensors. It handles files,
storage and checksums. `holdfast_core` and the daemons' engines decide which generation is
persisted, kept or restored.
"""
