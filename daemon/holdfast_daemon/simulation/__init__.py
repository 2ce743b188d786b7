"""A whole cluster in one process on a virtual clock, driven by one seed.

The engines are the real ones; disks, network, trainers and the control loop are small models with
real bytes, real parity and real checksums. Faults strike between any two effects. After each fault
the invariants of docs/architecture.md §2 are checked against what the disks hold.

`python -m holdfast_daemon.simulation --help` runs schedules by hand.
"""
