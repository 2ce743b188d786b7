"""The driver's answers to the kubelet: its identity, and the mounts of pods' volumes.

Specifications: Container Storage Interface 1.x, Identity and Node; the kubelet's registration of
plugins. Only inline volumes of pods (`volumeLifecycleModes: [Ephemeral]`) are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import grpc

from holdfast_core.errors import HoldfastError, InvalidJobError
from holdfast_daemon.csi.volumes import VolumePod, Volumes
from holdfast_protos import csi_pb2, csi_pb2_grpc
from holdfast_protos import plugin_registration_pb2 as registration_pb2
from holdfast_protos import plugin_registration_pb2_grpc as registration_pb2_grpc

DRIVER_NAME = "holdfast.dev"
CSI_VERSION = "1.0.0"

_CONTEXT = "csi.storage.k8s.io/"


class IdentityService(csi_pb2_grpc.IdentityServicer):
    """Answers who the driver is, and that it has no controller."""

    def GetPluginInfo(
        self, request: csi_pb2.GetPluginInfoRequest, context: grpc.ServicerContext
    ) -> csi_pb2.GetPluginInfoResponse:
        del request, context
        return csi_pb2.GetPluginInfoResponse(name=DRIVER_NAME, vendor_version=version("holdfast"))

    def GetPluginCapabilities(
        self, request: csi_pb2.GetPluginCapabilitiesRequest, context: grpc.ServicerContext
    ) -> csi_pb2.GetPluginCapabilitiesResponse:
        del request, context
        return csi_pb2.GetPluginCapabilitiesResponse()

    def Probe(
        self, request: csi_pb2.ProbeRequest, context: grpc.ServicerContext
    ) -> csi_pb2.ProbeResponse:
        del request, context
        return csi_pb2.ProbeResponse()


class NodeService(csi_pb2_grpc.NodeServicer):
    """Mounts and unmounts the volumes of this node's pods.

    Args:
        node: name of the node.
        log: called with a sentence about each volume.
    """

    def __init__(self, volumes: Volumes, node: str, log: Callable[[str], None]) -> None:
        self._volumes, self._node, self._log = volumes, node, log

    def NodePublishVolume(
        self, request: csi_pb2.NodePublishVolumeRequest, context: grpc.ServicerContext
    ) -> csi_pb2.NodePublishVolumeResponse:
        with _refusing(context):
            pod = _pod_in(dict(request.volume_context))
            self._volumes.publish(request.volume_id, Path(request.target_path), pod)
            self._log(f"mounted the volume of pod {pod.namespace}/{pod.name}")
        return csi_pb2.NodePublishVolumeResponse()

    def NodeUnpublishVolume(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, context: grpc.ServicerContext
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        with _refusing(context):
            self._volumes.unpublish(request.volume_id, Path(request.target_path))
            self._log(f"removed volume {request.volume_id}")
        return csi_pb2.NodeUnpublishVolumeResponse()

    def NodeGetCapabilities(
        self, request: csi_pb2.NodeGetCapabilitiesRequest, context: grpc.ServicerContext
    ) -> csi_pb2.NodeGetCapabilitiesResponse:
        del request, context
        return csi_pb2.NodeGetCapabilitiesResponse()

    def NodeGetInfo(
        self, request: csi_pb2.NodeGetInfoRequest, context: grpc.ServicerContext
    ) -> csi_pb2.NodeGetInfoResponse:
        del request, context
        return csi_pb2.NodeGetInfoResponse(node_id=self._node)


class RegistrationService(registration_pb2_grpc.RegistrationServicer):
    """Tells the kubelet where the driver listens.

    Args:
        endpoint: path of the driver's socket on the node.
        registered: called with the kubelet's objection, "" when it has none.
    """

    def __init__(self, endpoint: Path, registered: Callable[[str], None]) -> None:
        self._endpoint, self._registered = endpoint, registered

    def GetInfo(
        self, request: registration_pb2.InfoRequest, context: grpc.ServicerContext
    ) -> registration_pb2.PluginInfo:
        del request, context
        return registration_pb2.PluginInfo(
            type="CSIPlugin",
            name=DRIVER_NAME,
            endpoint=str(self._endpoint),
            supported_versions=[CSI_VERSION],
        )

    def NotifyRegistrationStatus(
        self, request: registration_pb2.RegistrationStatus, context: grpc.ServicerContext
    ) -> registration_pb2.RegistrationStatusResponse:
        del context
        refused = request.error or "the kubelet gave no reason"
        self._registered("" if request.plugin_registered else refused)
        return registration_pb2.RegistrationStatusResponse()


def _pod_in(given: dict[str, str]) -> VolumePod:
    """The pod that the kubelet names, for an inline volume.

    Raises:
        InvalidJobError: it names none, or the volume is not an inline one.
    """
    name, namespace, uid = (
        given.get(f"{_CONTEXT}pod.{key}", "") for key in ("name", "namespace", "uid")
    )
    if given.get(f"{_CONTEXT}ephemeral") != "true" or not (name and namespace and uid):
        raise InvalidJobError(
            f"driver {DRIVER_NAME} only has inline volumes of pods, and must be told the pod: its "
            f"CSIDriver object needs podInfoOnMount: true and volumeLifecycleModes: [Ephemeral]"
        )
    return VolumePod(namespace=namespace, name=name, uid=uid)


@contextmanager
def _refusing(context: grpc.ServicerContext) -> Iterator[None]:
    """End the call with the status and message of an error; the pod's events show the message."""
    try:
        yield
    except InvalidJobError as error:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except HoldfastError as error:
        context.abort(grpc.StatusCode.INTERNAL, str(error))
