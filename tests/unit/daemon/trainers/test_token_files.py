import asyncio
from pathlib import Path

import pytest

from holdfast_core.errors import AccessDeniedError, UnauthenticatedError
from holdfast_daemon.trainers.token_files import FileAuthenticator

TOKEN = "5e8ff9bf55ba3508199d22e984129be6"


@pytest.fixture
def judge(tmp_path: Path) -> FileAuthenticator:
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    (tokens / "team.moe").write_text(f"{TOKEN}\n")
    (tokens / "team.other").write_text("another")
    (tokens / "team.empty").write_text("")
    (tmp_path / "outside").write_text(TOKEN)
    return FileAuthenticator(tokens)


def denied(judge: FileAuthenticator, token: str, job: str) -> AccessDeniedError:
    with pytest.raises(AccessDeniedError) as caught:
        asyncio.run(judge.authorize(token, job))
    return caught.value


def test_a_token_opens_its_own_job_only(judge: FileAuthenticator) -> None:
    asyncio.run(judge.authorize(TOKEN, "team.moe"))
    assert TOKEN not in str(denied(judge, TOKEN, "team.other"))
    assert asyncio.run(judge.visible(TOKEN, ["team.moe", "team.other", "gone"])) == ["team.moe"]


@pytest.mark.parametrize("token", ["x", TOKEN[:-1], TOKEN + "0", "ä", " "])
def test_what_is_no_token_opens_nothing(judge: FileAuthenticator, token: str) -> None:
    denied(judge, token, "team.moe")
    denied(judge, token, "team.empty")


def test_a_call_without_a_token_learns_what_to_do(judge: FileAuthenticator) -> None:
    error = denied(judge, "", "team.moe")
    assert isinstance(error, UnauthenticatedError)
    assert "HOLDFAST_TOKEN_FILE" in str(error)
    with pytest.raises(UnauthenticatedError):
        asyncio.run(judge.visible("", ["team.moe"]))


def test_a_token_names_the_job_of_its_bearer(judge: FileAuthenticator) -> None:
    assert asyncio.run(judge.job_of(TOKEN)) == "team.moe"
    for token in ("", "made-up", TOKEN[:-1]):
        with pytest.raises(UnauthenticatedError):
            asyncio.run(judge.job_of(token))


@pytest.mark.parametrize("job", ["../outside", "..", ".", "", "x/../../outside", "a\0b", "j" * 300])
def test_no_name_of_a_job_leads_out_of_the_directory(judge: FileAuthenticator, job: str) -> None:
    denied(judge, TOKEN, job)


def test_a_token_that_was_replaced_is_good_no_more(
    judge: FileAuthenticator, tmp_path: Path
) -> None:
    (tmp_path / "tokens" / "team.moe").write_text("newer")
    denied(judge, TOKEN, "team.moe")
    asyncio.run(judge.authorize("newer", "team.moe"))
