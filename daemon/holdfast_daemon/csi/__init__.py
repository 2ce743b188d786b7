"""The node's driver of the volumes through which trainers' pods reach the daemon.

Why: a pod that mounts the sockets by a hostPath needs a namespace in which every pod may mount any
directory of the node. An inline volume of this driver is allowed even where Pod Security enforces
`restricted`, and the kubelet names the pod that it is for, so that each pod gets its own token.
"""
