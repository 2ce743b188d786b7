"""The operator on Kubernetes: the reconciler over custom resources, pods and nodes.

Pure modules build manifests and read objects (`manifests`, `gangs`, `pods`, `nodes`, `status`);
thin adapters talk to the API server (`api`, `watches`, `events`, `leader`). kopf carries each job's
life (`handlers`): `job_loop` is the control loop of one job, and `fleet` holds all of them.
`operating` wires one replica; `__main__` runs it. `holdfast_operator.reconciler.reconcile` decides
what to do about a failure, never a module of this package.
"""
