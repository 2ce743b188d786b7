"""The node's driver of the volumes by which trainers' pods get at the daemon.

Why: a pod that mounts the sockets by a hostPath needs a namespace in which every pod may mount any
directory of the node. An inline volume of this driver is allowed even where Pod Security enforces
`restricted`, and the kubelet says for which pod it is, so that each pod gets a token of its own.
"""
