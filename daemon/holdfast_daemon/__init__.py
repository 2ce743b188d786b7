"""The daemon: holds snapshots of the training state in this node's memory, and parity for others.

`engine` decides (sans-I/O, one per job). It emits effects (`engine.effects`), which the adapters
carry out: `memory` (arenas and manifests on tmpfs), `transport` (zero-copy TCP), `parity` (bytes),
`durable` (the durable tier), `trainers`, `peers` and `control` (gRPC). `node` wires them.
"""
