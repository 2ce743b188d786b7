from __future__ import annotations

import pytest

from holdfast_core.errors import InvalidJobError
from holdfast_core.quantities import format_bytes, format_portion, format_rate, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        (1073741824, 1073741824),
        ("1Ki", 1024),
        ("200Gi", 200 * 1024**3),
        ("2Ti", 2 * 1024**4),
        ("1Pi", 1024**5),
        ("1k", 1000),
        ("3M", 3_000_000),
        ("1.5G", 1_500_000_000),
        ("0.5Mi", 524288),
        ("0.1", 1),
        ("1.0001Ki", 1025),
        ("2T", 2 * 10**12),
        ("2P", 2 * 10**15),
    ],
)
def test_quantities_are_bytes(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "Gi", "1 Gi", "-1", "1K", "1m", "1gi", "1e3", ".5Gi", "1.Gi", "1GiB", -1, "١Gi"]
)
def test_other_text_is_refused_with_what_to_write(text: str | int) -> None:
    with pytest.raises(InvalidJobError, match="is not an amount of memory; write bytes or use Ki"):
        parse_bytes(text)


def test_bytes_are_shown_in_gib_and_exactly() -> None:
    assert format_bytes(1610612736) == "1.50 GiB (1610612736 bytes)"


@pytest.mark.parametrize(
    ("bytes_s", "text"),
    [
        (0, "0 MB/s"),
        (4e5, "0.4 MB/s"),
        (9.94e6, "9.9 MB/s"),
        (12.3e6, "12 MB/s"),
        (1.34e9, "1.3 GB/s"),
    ],
)
def test_rates_are_shown_in_powers_of_1000(bytes_s: float, text: str) -> None:
    assert format_rate(bytes_s) == text


@pytest.mark.parametrize(
    ("portion", "text"),
    [
        (0, "0%"),
        (1e-6, "<0.001%"),
        (0.0000482, "0.0048%"),
        (0.0053, "0.53%"),
        (0.0949, "9.5%"),
        (0.0996, "10%"),
        (0.123, "12%"),
        (1.0, "100%"),
    ],
)
def test_portions_are_shown_as_percentages_of_two_digits(portion: float, text: str) -> None:
    assert format_portion(portion) == text
