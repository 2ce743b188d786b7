"""`holdfast demo`: faults injected into jobs on this machine, and a report of each."""
