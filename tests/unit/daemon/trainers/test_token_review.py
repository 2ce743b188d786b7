"""TokenReviews over real HTTPS, with a CA of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_server import AUDIENCE, ApiServer

from holdfast_core.errors import InvalidJobError, UnauthenticatedError, UnreachableError
from holdfast_daemon.trainers.auth import PodIdentity
from holdfast_daemon.trainers.token_review import TokenReviewApi

USER = {
    "username": "system:serviceaccount:team:trainer",
    "extra": {"authentication.kubernetes.io/pod-name": ["moe-0-1"]},
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer(tmp_path) as running:
        yield running


def api(server: ApiServer) -> TokenReviewApi:
    return TokenReviewApi(server.address, server.directory)


def test_a_good_token_names_its_pod(server: ApiServer) -> None:
    token = server.admit("team", "moe-0-1")
    assert api(server).review(token) == PodIdentity(namespace="team", pod="moe-0-1")
    assert server.asked[0]["spec"] == {"token": token, "audiences": [AUDIENCE]}


def test_the_own_token_is_read_anew_because_it_is_rotated(server: ApiServer) -> None:
    reviewer, token = api(server), server.admit("team", "moe-0-1")
    reviewer.review(token)
    server.own_token = "renewed"
    with pytest.raises(UnreachableError, match="create tokenreviews"):
        reviewer.review(token)
    (server.directory / "token").write_text("renewed")
    assert reviewer.review(token).pod == "moe-0-1"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"authenticated": False, "error": "token has expired"}, "token has expired"),
        ({}, "does not accept it"),
        ({"authenticated": True, "user": USER}, "did not check its audience"),
        (
            {"authenticated": True, "user": USER, "audiences": ["https://kubernetes"]},
            "did not check its audience",
        ),
        (
            {"authenticated": True, "audiences": [AUDIENCE], "user": {"username": "admin"}},
            "belongs to admin",
        ),
        (
            {"authenticated": True, "audiences": [AUDIENCE], "user": {**USER, "extra": {}}},
            "not to a pod",
        ),
        (
            {"authenticated": True, "audiences": [AUDIENCE], "user": {**USER, "username": "bob"}},
            "belongs to bob",
        ),
    ],
)
def test_what_is_no_pod_of_this_cluster_is_refused(
    server: ApiServer, status: dict[str, object], words: str
) -> None:
    server.answer = 201, json.dumps({"status": status}).encode()
    with pytest.raises(UnauthenticatedError, match=words):
        api(server).review("token")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((403, b"{}"), "create tokenreviews.authentication.k8s.io"),
        ((429, b"{}"), "answered 429"),
        ((500, b"sent: token"), "answered 500"),
        ((201, b"not json"), "not a TokenReview"),
        ((201, b"[]"), "not a TokenReview"),
        ((201, b'{"status": {"authenticated": true, "audiences": 7}}'), "not a TokenReview"),
    ],
)
def test_a_server_that_cannot_decide_is_not_a_denial(
    server: ApiServer, answer: tuple[int, bytes], words: str
) -> None:
    server.answer = answer
    with pytest.raises(UnreachableError, match=words) as failed:
        api(server).review("secret-token")
    assert "secret-token" not in str(failed.value)


def test_a_server_that_is_away_is_unreachable(server: ApiServer) -> None:
    reviewer = api(server)
    server.stop()
    with pytest.raises(UnreachableError, match="Connection refused"):
        reviewer.review("token")


def test_a_server_with_a_strange_certificate_is_not_asked(
    server: ApiServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = ApiServer(tmp_path_factory.mktemp("other"))
    stranger = TokenReviewApi(server.address, other.directory)
    with pytest.raises(UnreachableError):
        stranger.review("token")
    assert not server.asked, "a token was sent to a server that was not verified"


def test_what_is_missing_is_named_when_the_daemon_starts(tmp_path: Path) -> None:
    with pytest.raises(InvalidJobError, match="--api-server HOST:PORT"):
        TokenReviewApi("", tmp_path)
    with pytest.raises(InvalidJobError, match="whose token is mounted"):
        TokenReviewApi("kubernetes:443", tmp_path)
