"""Tokens of volumes are known by records on the node; all others go to the API server."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from holdfast_core.errors import UnauthenticatedError
from holdfast_daemon.trainers.auth import PodIdentity
from holdfast_daemon.trainers.volume_tokens import VolumeTokenReviewer

VOLUME = f"csi-{'0' * 64}"
TOKEN = f"volume.{VOLUME}.secret"
REVIEWED = PodIdentity(namespace="reviewed", pod="by-the-api-server")


class Others:
    """Stands for the API server."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def review(self, token: str) -> PodIdentity:
        self.asked.append(token)
        return REVIEWED


def test_a_volumes_token_is_its_pods_and_nobody_is_asked(tmp_path: Path) -> None:
    pod = {"namespace": "team", "name": "moe-0-1", "uid": "uid"}
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    (tmp_path / VOLUME).write_text(json.dumps({"pod": pod, "token_sha256": digest}))
    others = Others()
    found = VolumeTokenReviewer(tmp_path, others).review(TOKEN)
    assert found == PodIdentity(namespace="team", pod="moe-0-1")
    assert others.asked == []


def test_a_token_of_a_volume_that_is_gone_is_refused_and_nobody_is_asked(tmp_path: Path) -> None:
    others = Others()
    with pytest.raises(UnauthenticatedError, match="no volume") as refused:
        VolumeTokenReviewer(tmp_path, others).review(TOKEN)
    assert TOKEN not in str(refused.value)
    assert others.asked == []


def test_other_tokens_are_left_to_the_api_server(tmp_path: Path) -> None:
    others = Others()
    assert VolumeTokenReviewer(tmp_path, others).review("a.b.c") == REVIEWED
    assert others.asked == ["a.b.c"]
