"""Calls to a daemon of the cluster through its socket, as a pod on its node makes them."""

from __future__ import annotations

import grpc
from cluster import Cluster
from waiting import WAIT_S, error_of

from holdfast_daemon.trainers.auth import AUDIENCE
from holdfast_operator.kube.pods.manifests import SOCKETS_PATH
from holdfast_protos import codec, trainer_pb2, trainer_pb2_grpc


def hello(cluster: Cluster, node: str, token: str, job: str) -> int:
    """The epoch of the job with the key `job`, as the bearer of `token` learns it.

    Raises:
        HoldfastError: what the daemon refuses it with.
    """
    socket = cluster.nodes[node].path(f"{SOCKETS_PATH}/daemon.sock")
    request = trainer_pb2.HelloRequest(protocol_version=codec.PROTOCOL_VERSION, job=job)
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        stub = trainer_pb2_grpc.TrainerStub(channel)
        try:
            bearer = (("authorization", f"Bearer {token}"),)
            return int(stub.Hello(request, timeout=WAIT_S, metadata=bearer).epoch)
        except grpc.RpcError as error:
            raise error_of(error) from error


def token_for(cluster: Cluster, pod: str, namespace: str) -> str:
    """A token as kubelet mounts it into the pod."""
    account = cluster.get("pod", pod, "-n", namespace)["spec"]["serviceAccountName"]
    return cluster.kubectl(
        *("create", "token", account, "-n", namespace, "--audience", AUDIENCE),
        *("--bound-object-kind", "Pod", "--bound-object-name", pod),
    ).strip()
