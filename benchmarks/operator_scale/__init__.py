"""How the Kubernetes operator bears thousands of members: `make bench-operator`.

A real API server, nodes and kubelets that KWOK plays, the operator as a process, and one process
that speaks Control for every daemon. Measures only the operator: nothing trains.
"""
