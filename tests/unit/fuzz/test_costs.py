"""Every parser of bytes from outside takes time in proportion to them: see `tests/fuzz`."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from fuzzing_mutations import grown
from fuzzing_targets import TARGETS, Target

from holdfast_cli.job_files import FILE_BYTES_MAX, read_document
from holdfast_core.errors import InvalidJobError
from holdfast_core.job.documents import PROBLEMS_MAX, VALUES_MAX
from holdfast_core.job.parsing import parse_job

SMALL_BYTES, TIMES = 16_384, 8
SMALL_BYTES_OF = {"job-file": 4096}
"""Of those that take long for each byte."""
RATIO_MAX = 3 * TIMES
"""In proportion it is `TIMES`, by the square `TIMES`²."""
NOISE_S = 0.02
"""What a collection of garbage, or another process, may add to a measurement."""
WITH_CONNECTIONS = {"http", "arena-socket"}
"""Those bound the bytes that they read: docs/limits.md."""

HASH_PRIME = 2**61 - 1
"""All its multiples have one place in a table of Python's."""
JOB = "apiVersion: holdfast.dev/v1alpha1\nkind: MoETrainingJob\nmetadata: {name: a}\nspec:\n"


def _cpu_s(target: Target, data: bytes) -> float:
    """CPU time of this thread that `data` takes: the least of two attempts, if the first is
    long."""
    took_s = []
    for _ in range(2):
        began = time.thread_time()
        with suppress(*target.allowed):
            target.parse(data)
        took_s.append(time.thread_time() - began)
        if took_s[0] < NOISE_S:
            break
    return min(took_s)


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(target, marks=pytest.mark.slow if target.name in SMALL_BYTES_OF else [])
        for target in TARGETS
        if target.name not in WITH_CONNECTIONS
    ],
    ids=lambda target: target.name,
)
def test_the_time_of_a_parser_grows_with_the_bytes(target: Target) -> None:
    seeds, size = target.seeds(), SMALL_BYTES_OF.get(target.name, SMALL_BYTES)
    ways = zip(grown(seeds, size), grown(seeds, TIMES * size), strict=True)
    for small, large in ways:
        large_s = _cpu_s(target, large)
        if large_s > NOISE_S:
            allowed_s = RATIO_MAX * max(_cpu_s(target, small), NOISE_S)
            assert large_s < allowed_s, f"{large_s:.2f} s for {large[:40]!r}…{large[-40:]!r}"


def _keys(prefix: str, line: str, count: int) -> str:
    return prefix + "".join(line.format(i + 1, (i + 1) * HASH_PRIME) for i in range(count))


@pytest.mark.parametrize(
    "text",
    [
        "a: 1" + ":1" * (FILE_BYTES_MAX // 2 - 8),
        "a: !!int 1" + ":1" * (FILE_BYTES_MAX // 2 - 8),
        "a: 1" + ":1" * (FILE_BYTES_MAX // 2 - 8) + ".5",
        "a: 0x" + "f" * (FILE_BYTES_MAX - 8),
        "a: 0." + "1" * (FILE_BYTES_MAX - 8),
        _keys("a:\n", " {1}: 1\n", VALUES_MAX // 2 - 2),
        _keys("a: {{".replace("{{", "{"), "{1}: 1, ", VALUES_MAX // 2 - 2) + "}",
        _keys("a: !!set {", "{1}, ", VALUES_MAX // 2 - 2) + "}",
        _keys(JOB, "  nodez{0}: 1\n", VALUES_MAX // 2 - 9),
        _keys(JOB, "  nodez{0}: {{a: 1}}\n", VALUES_MAX // 4 - 9),
        _keys("", "- &a{0} b\n", VALUES_MAX - 2),
        JOB + "  " + "n" * (FILE_BYTES_MAX - 200) + ": 1\n",
    ],
    ids=lambda text: text[:24],
)
def test_no_job_file_takes_more_than_its_bytes_should(text: str) -> None:
    began, said = time.thread_time(), ""
    try:
        parse_job(read_document(text.encode()))
    except InvalidJobError as error:
        said = str(error)
    assert said and len(said) < 400 * PROBLEMS_MAX
    assert time.thread_time() - began < 10, "a MiB of plain words takes about two seconds"
