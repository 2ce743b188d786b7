"""The operator on Kubernetes: the reconciler over custom resources, pods and nodes.

Pure parts build and read manifests (`pods`, `gangs`, `nodes`, `status`, `counters`); thin adapters
talk to the API server (`api`, `watches`, `events`, `leader`); `job_loop` is the control loop of one
job and `fleet` holds all of them. `__main__` wires. What is done about a failure is decided by
`holdfast_operator.reconciler.reconcile`, never here.
"""
