"""The daemon: holds snapshots of the training state in this node's memory, and parity for others.

`engine` decides (sans-I/O, one per job); `effects` is the language between it and the adapters:
`storage` (arenas and manifests on tmpfs), `bulk` (zero-copy TCP), `parity` (bytes), `server`,
`peers`, `control` (gRPC). `__main__` wires them.
"""
