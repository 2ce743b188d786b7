"""Job files that mean harm, or were typed by a cat."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast_cli.job_files import FILE_BYTES_MAX, load_job, read_document
from holdfast_core.errors import InvalidJobError
from holdfast_core.job.parsing import parse_job

EXAMPLE = (Path(__file__).parents[4] / "examples" / "moe-job.yaml").read_text()
_LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)
_MERGES = "a0: &a0 {k: v}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 20)}]}}\n" for i in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (_LAUGHS, "aliases expanded"),
        (_MERGES, "aliases expanded"),
        ("a: &a [*a]", "aliases expanded"),
        ("[" * 100_000, "levels"),
        ("{a: " * 5000, "levels"),
        ("- " * 5000, "levels"),
        ("a: " + "9" * 5000, "line 1: a number of 5000 characters"),
        ("a: 0b" + "1" * 65, "line 1: 0b1* is a number of 65 bits"),
        ("{1: a, 18446744073709551616: b}", "is a number of 65 bits"),
        ("a: !!int x", "line 1: 'x' cannot be read as int"),
        ("a: !!int ''", "line 1: '' cannot be read as int"),
        ("\na: !!bool x", "line 2: 'x' cannot be read as bool"),
        ("a: !!set {b}", "not YAML"),
        ("a: !!timestamp 2001-02-28", "not YAML"),
        ("a: !!python/object/apply:os.system [ls]", "not YAML"),
        ("a: \x00", "not YAML"),
        ("a: 1\nb: {c: 1, d: 2, c: 3}", "line 2: 'c' is given twice"),
        ("spec: {nodes: 1}\nspec: {nodes: 2}", "line 2: 'spec' is given twice"),
        ("x" * (FILE_BYTES_MAX + 1), "bytes"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_not_a_job_is_refused_at_once(text: str, wrong: str) -> None:
    with pytest.raises(InvalidJobError, match=wrong):
        read_document(text.encode())


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ("nodes: 4", "nodes: 0x" + "f" * 5000, "5002 characters"),
        ("nodes: 4", "nodes: .nan", "is NaN"),
        ("nodes: 4", "nodes: .inf", "inf"),
        ("nodes: 4", "nodes: " + "9" * 70, "bits"),
        ("nodes: 4", 'nodes: "\\ud800"', "half a character"),
        ("name: ", "name: \u0430", "cannot have this name"),
        ("name: ", "name: \uff11", "cannot have this name"),
        ("name: ", "name: ../../", "cannot have this name"),
        ("name: ", 'name: "a\\u202e"\n  x: ', "cannot have this name"),
    ],
)
def test_tricks_with_numbers_and_letters_are_refused(old: str, new: str, wrong: str) -> None:
    assert old in EXAMPLE
    with pytest.raises(InvalidJobError, match=wrong):
        parse_job(read_document(EXAMPLE.replace(old, new, 1).encode()))


def test_a_file_with_an_ordinary_alias_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(EXAMPLE.replace("nodes: 4", "nodes: &n 4", 1).replace("dp: 4", "dp: *n", 1))
    assert load_job(path) == parse_job(read_document(EXAMPLE.encode()))


def test_a_key_that_is_merged_in_may_be_given_again() -> None:
    text = "a: &a {k: 1, l: 1}\nb: &b {<<: *a, k: 2}\nc: {<<: *b, k: 3}"
    assert read_document(text.encode())["c"] == {"k": 3, "l": 1}


@pytest.mark.parametrize("text", ["1:30", "1:30.5", "2001-02-03", "2001-02-31", "-190:20:30"])
def test_numbers_in_base_60_and_dates_are_text_as_they_are_for_kubernetes(text: str) -> None:
    assert read_document(f"a: {text}".encode()) == {"a": text}


def test_the_largest_numbers_of_a_job_are_read() -> None:
    text = f"a: 0b{'1' * 64}\nb: {-(2**63)}\nc: 1.7976931348623157e+308\nd: 1_000"
    assert read_document(text.encode()) == {
        "a": 2**64 - 1,
        "b": -(2**63),
        "c": 1.7976931348623157e308,
        "d": 1000,
    }
