"""Judges tokens by files, for a local run, where there is no API server to ask.

A directory has one file for each job, which holds the job's token and has the name of the job's
directory in the daemon's memory. The launcher of the job writes the file, and gives it to its
trainers to read.

Must not: keep, log or repeat a token.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from pathlib import Path

from holdfast_core.errors import AccessDeniedError, UnauthenticatedError
from holdfast_core.job.names import job_file_name, job_of_file_name


class FileAuthenticator:
    """`trainers.auth.Authenticator` by the files in `directory`. They are read for each call:
    calls that carry a token are few, and a token that was replaced is refused at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def authorize(self, token: str, job: str) -> None:
        _insist_on(token)
        if not self._opens(token, job):
            raise AccessDeniedError(
                f"the token of this call is not the token of job {job}; run the trainer as part of "
                f"the job, which gives it HOLDFAST_TOKEN_FILE"
            )

    async def visible(self, token: str, jobs: Iterable[str]) -> list[str]:
        _insist_on(token)
        return [job for job in jobs if self._opens(token, job)]

    async def job_of(self, token: str) -> str:
        _insist_on(token)
        try:
            files = sorted(file.name for file in self._directory.iterdir())
        except OSError:
            files = []
        for job in map(job_of_file_name, files):
            if self._opens(token, job):
                return job
        raise UnauthenticatedError(
            "the token of this call does not belong to a job on this machine; run the trainer as "
            "part of its job, which gives it HOLDFAST_TOKEN_FILE"
        )

    def close(self) -> None:
        """Do nothing: there is nothing to end."""

    def _opens(self, token: str, job: str) -> bool:
        name = job_file_name(job)
        if not name:
            return False
        try:
            wanted = (self._directory / name).read_bytes().strip()
        except OSError:  # no such job, or a name that no file has
            return False
        return bool(wanted) and hmac.compare_digest(wanted, token.encode())


def _insist_on(token: str) -> None:
    if not token:
        raise UnauthenticatedError(
            "this call carries no token: name the file of the job's token in HOLDFAST_TOKEN_FILE"
        )
