"""Finds the pod of a token among the volumes of this node (`csi.volumes`), without any request.
Other tokens are left to a second reviewer.

Must not: keep, log or repeat a token.
"""

from __future__ import annotations

from pathlib import Path

from holdfast_core.errors import UnauthenticatedError
from holdfast_daemon.csi.volumes import TOKEN_PREFIX, pod_of_token
from holdfast_daemon.trainers.auth import PodIdentity, Reviewer


class VolumeTokenReviewer:
    """`trainers.auth.Reviewer` that looks tokens up in the records of volumes.

    Args:
        records: directory of the records of the node's volumes.
        others: reviews tokens that are not of a volume.
    """

    def __init__(self, records: Path, others: Reviewer) -> None:
        self._records, self._others = records, others

    def review(self, token: str) -> PodIdentity:
        if not token.startswith(f"{TOKEN_PREFIX}."):
            return self._others.review(token)
        pod = pod_of_token(self._records, token)
        if pod is None:
            raise UnauthenticatedError("no volume of a pod on this node has it")
        return PodIdentity(namespace=pod.namespace, pod=pod.name)
