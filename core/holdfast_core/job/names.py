"""A job's name as one component of a path, the same in every process that looks for its files."""

from __future__ import annotations

from urllib.parse import quote, unquote


def job_file_name(job: str) -> str:
    """Name of the directory or file of `job`; empty when `job` is."""
    name = quote(job, safe="")
    return f"%2E{name[1:]}" if name.startswith(".") else name


def job_of_file_name(name: str) -> str:
    """The job whose files have this name."""
    return unquote(name)
