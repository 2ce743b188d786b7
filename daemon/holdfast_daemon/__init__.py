"""The daemon: holds snapshots of the training state in this node's memory, and parity for other
nodes.

`engine` decides (sans-I/O, one per job). It emits effects (`engine.effects`), which the adapters
carry out: `memory` (arenas and manifests on tmpfs), `transport` (zero-copy TCP), `parity` (bytes),
`durable` (the durable tier), `trainers` and `net` (gRPC). `node` wires them.
"""
