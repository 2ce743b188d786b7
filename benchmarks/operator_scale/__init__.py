"""Load of thousands of members on the Kubernetes operator: `make bench NAME=operator`.

A real API server, nodes and kubelets simulated by KWOK, the operator as a process, and one process
that simulates the Control stream of every daemon. Measures only the operator: nothing trains.
"""
