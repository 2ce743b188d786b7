"""A job's name as one component of a path, the same for everybody who looks for its files."""

from __future__ import annotations

from urllib.parse import quote, unquote


def job_file_name(job: str) -> str:
    """What the directory or file of `job` is called; empty when the name is."""
    name = quote(job, safe="")
    return f"%2E{name[1:]}" if name.startswith(".") else name


def job_of_file_name(name: str) -> str:
    """The job whose files are called so."""
    return unquote(name)
