"""The durable tier: generations as files that anything can read, in any place fsspec can reach.

Daemons write and load whole ranks through it, trainers and tools read tensors. It knows files,
places and checksums; which generation is persisted, kept or restored is decided in `holdfast_core`
and by the daemons' engines.
"""
