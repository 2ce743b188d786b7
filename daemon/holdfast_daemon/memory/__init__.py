"""The daemon's memory: arenas, parity blocks and manifests as files of a tmpfs."""
