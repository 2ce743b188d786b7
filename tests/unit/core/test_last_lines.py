"""The last lines of a process: bounded, printable, without secrets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.last_lines import (
    CHARACTERS_MAX,
    LINES_MAX,
    WINDOW_BYTES,
    decoded_end,
    essence_of,
    last_lines,
    secrets_among,
)

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    import no_such_module
ModuleNotFoundError: No module named 'no_such_module'
"""


def test_a_short_traceback_is_kept_as_it_is() -> None:
    assert last_lines(TRACEBACK) == TRACEBACK.rstrip()


def test_the_end_of_a_long_output_is_kept() -> None:
    found = last_lines("\n".join(f"line {n}" for n in range(1000)))
    assert found.splitlines() == [f"line {n}" for n in range(1000 - LINES_MAX, 1000)]
    assert len(last_lines("x" * 100_000)) == CHARACTERS_MAX


@given(st.text())
def test_the_result_is_bounded_and_free_of_terminal_escapes_for_any_text(text: str) -> None:
    found = last_lines(text)
    assert len(found) <= CHARACTERS_MAX and len(found.splitlines()) <= LINES_MAX
    assert all(character.isprintable() or character == "\n" for character in found)


def test_colours_and_lines_that_were_written_over_are_gone() -> None:
    assert last_lines("10 %\r20 %\r\x1b[31mValueError\x1b[0m: bad\x07\r\n") == "ValueError: bad?"


@pytest.mark.parametrize(
    "text",
    [
        "cannot open s3://user:hunter2hunter2@bucket/x",
        "Authorization: Bearer hunter2hunter2",
        "connect(password='hunter2hunter2', port=1)",
        '{"api_key": "hunter2hunter2"}',
        "WANDB_API_KEY=hunter2hunter2",
        "HF_TOKEN: hunter2hunter2",
        "key hf_hunter2hunter2hunter2 was refused",
        "jwt eyJhbGciOiJI.hunter2hunter2.hunter2hunter2",
        "-----BEGIN RSA PRIVATE KEY-----\nhunter2hunter2\nhunter2",
        "\x1b[1mtoken=\x1b[0mhunter2hunter2",
        "AKIAHUNTER2HUNTER222".upper(),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str) -> None:
    found = last_lines(text)
    assert "hunter2" not in found.lower() and "***" in found


@pytest.mark.parametrize(
    "text",
    ["tokens: 4096 of 8192", "tokenizer: gpt2", "KeyError: 'layers.3.weight'", "at 10.0.0.1:29500"],
)
def test_what_does_not_look_like_a_secret_is_not_hidden(text: str) -> None:
    assert last_lines(text) == text


def test_values_of_variables_with_names_of_secrets_are_hidden_anywhere() -> None:
    variables = {
        "STORE_SECRET": "open sesame",
        "API_KEY": "1",
        "HOME": "/root",
        "SSH_KEY": "abcdef",
    }
    secrets = secrets_among(variables)
    assert sorted(secrets) == ["abcdef", "open sesame"]
    assert last_lines("said open sesame to abcdef in /root", secrets) == "said *** to *** in /root"


def test_a_line_that_the_window_cuts_is_left_out() -> None:
    data = b"password=" + b"s" * WINDOW_BYTES + b"\nlast"
    assert decoded_end(data) == "last"
    assert decoded_end(b"short") == "short"


def test_failures_of_one_kind_have_one_essence() -> None:
    first = essence_of("x\nRuntimeError: port 29500 of <object at 0x7f12ab>")
    assert first == essence_of("RuntimeError: port 29613 of <object at 0x7f99cd>")
    assert first != essence_of("ValueError: port 29500")
