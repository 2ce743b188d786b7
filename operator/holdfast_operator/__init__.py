"""Decide who takes part in a job and what happens after a failure; never touch tensors.

`reconciler` decides, without I/O. `control` exchanges messages with the daemons. `kube` runs jobs
in a Kubernetes cluster; `crd` writes the cluster's resource.
"""
