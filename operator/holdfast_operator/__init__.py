"""Decides who takes part in a job and what happens after a failure; never touches tensors.

`reconcile` decides, without I/O. `control.server` hears the daemons. `local` runs a job on this
machine. `cli` is the `holdfast` command.
"""
