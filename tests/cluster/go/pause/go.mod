// The process that holds a pod's namespaces, and nothing else.
module holdfast.dev/tests/cluster/pause

go 1.26.0
