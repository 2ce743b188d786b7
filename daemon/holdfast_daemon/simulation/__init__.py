"""A whole cluster in one process on a virtual clock, driven by one seed.

The engines are the real ones, and so is what carries out their effects; disks, network, trainers
and the control loop are small models with real bytes. Faults strike between any two effects, and
between any two pieces of a transfer. After each fault the invariants of docs/architecture.md §2 are
checked against what the disks hold.

`python -m holdfast_daemon.simulation --help` runs schedules by hand.
"""
