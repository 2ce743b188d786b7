"""The kinds of object that the operator uses, their paths in the API, and labels. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.job.parsing import API_VERSION

GROUP, VERSION = API_VERSION.split("/")
JOB_LABEL, MEMBER_LABEL, ATTEMPT_LABEL = f"{GROUP}/job", f"{GROUP}/member", f"{GROUP}/attempt"
"""Labels of the pods of trainers."""
CSI_DRIVER = GROUP
"""Name of the daemons' CSI driver."""
SUSPECT = f"{GROUP}/suspect"
"""Key of the taint of nodes that fail again and again, and of the annotation that says what
Holdfast has done to them."""
TOLERATION = {"key": SUSPECT, "operator": "Exists", "effect": "NoSchedule"}
"""What pods of Holdfast tolerate: members prefer other nodes, and take such a one if there is no
other, or if their memory is there."""


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object in the API."""

    group: str
    """API group; empty for the core group."""
    version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The URL path of a collection, an object or a subresource. Without a namespace, the
        collection is that of all namespaces."""
        parts = ["/api", self.version] if not self.group else ["/apis", self.group, self.version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/".join(parts)


JOBS = Resource(GROUP, VERSION, "moetrainingjobs")
CONFIG_MAPS = Resource("", "v1", "configmaps")
SECRETS = Resource("", "v1", "secrets")
DAEMON_SETS = Resource("apps", "v1", "daemonsets")
PODS = Resource("", "v1", "pods")
NODES = Resource("", "v1", "nodes", namespaced=False)
SERVICES = Resource("", "v1", "services")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts")
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles")
ROLE_BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings")
CONTROLLER_REVISIONS = Resource("apps", "v1", "controllerrevisions")
DISRUPTION_BUDGETS = Resource("policy", "v1", "poddisruptionbudgets")
EVENTS = Resource("events.k8s.io", "v1", "events")
LEASES = Resource("coordination.k8s.io", "v1", "leases")
ENDPOINT_SLICES = Resource("discovery.k8s.io", "v1", "endpointslices")
WORKLOADS = Resource("kueue.x-k8s.io", "v1beta2", "workloads")
RESOURCE_FLAVORS = Resource("kueue.x-k8s.io", "v1beta2", "resourceflavors", namespaced=False)
WORKLOAD_PRIORITIES = Resource(
    "kueue.x-k8s.io", "v1beta2", "workloadpriorityclasses", namespaced=False
)
PRIORITIES = Resource("scheduling.k8s.io", "v1", "priorityclasses", namespaced=False)
VOLCANO_POD_GROUPS = Resource("scheduling.volcano.sh", "v1beta1", "podgroups")
COSCHEDULING_POD_GROUPS = Resource("scheduling.x-k8s.io", "v1alpha1", "podgroups")
