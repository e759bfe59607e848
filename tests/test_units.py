"""Quantities in and out: exact cases, nonsense, and that printed amounts read back."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.errors import UsageError
from moebatch.units import format_bytes, format_count, format_duration, format_rate, parse_bytes

FACTORS = {
    "kb": 10**3,
    "MB": 10**6,
    "g": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "GiB": 2**30,
    "tib": 2**40,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1", 1),
        ("512b", 512),
        ("14GiB", 14 * 2**30),
        ("500MB", 500 * 10**6),
        ("6g", 6 * 10**9),
        ("6G", 6 * 10**9),
        ("6gib", 6 * 2**30),
        ("1.5 KiB", 1536),
        (".5k", 500),
        ("2.TB", 2 * 10**12),
        ("  7 MiB \n", 7 * 2**20),
        ("0.0000001b", 0),
        ("1.9999b", 1),
    ],
)
def test_parse_bytes(text, expected) -> None:
    assert expected == parse_bytes(text)


@pytest.mark.parametrize(
    "text",
    ["", " ", "GiB", "-1GiB", "+1", "1e9", "1_000", "1,5GiB", "1.2.3", ".", "6 G iB", "6Gi",
     "6GBit", "nan", "inf", "0x10", "6GiB\x00", "٣GiB", "9" * 400, "1." + "0" * 400,
     "6\N{FULLWIDTH LATIN CAPITAL LETTER G}B", "6\N{KELVIN SIGN}"],
)  # fmt: skip
def test_nonsense_is_a_usage_error(text) -> None:
    """Guards: four hundred digits became an infinite float, and an OverflowError."""
    with pytest.raises(UsageError) as caught:
        parse_bytes(text)
    assert caught.value.exit_code == 2
    assert caught.value.hint


@given(st.text(max_size=12))
def test_any_text_is_an_amount_or_a_usage_error(text) -> None:
    try:
        assert parse_bytes(text) >= 0
    except UsageError as error:
        assert "\n" not in str(error)


@given(st.integers(0, 10**18 - 1), st.sampled_from(sorted(FACTORS)))
def test_whole_amounts_are_exact(number, unit) -> None:
    """Guards: amounts above 2^53 went through a float and lost their last bits."""
    assert number * FACTORS[unit] == parse_bytes(f"{number}{unit}")
    assert number * FACTORS[unit] == parse_bytes(f" {number} {unit.upper()} ")


@given(st.integers(0, 10**6), st.integers(0, 999), st.sampled_from(sorted(FACTORS)))
def test_fractions_are_rounded_down(whole, thousandths, unit) -> None:
    exact = (whole + Fraction(thousandths, 1000)) * FACTORS[unit]
    assert exact.numerator // exact.denominator == parse_bytes(f"{whole}.{thousandths:03d}{unit}")


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (2.90e9, "2.70 GiB"),
        (9.996 * 2**30, "10.0 GiB"),
        (14 * 2**30, "14.0 GiB"),
        (812 * 2**20, "812 MiB"),
        (99.96 * 2**20, "100 MiB"),
        (4000 * 2**30, "4000 GiB"),
        (-2 * 2**20, "-2.00 MiB"),
    ],
)
def test_format_bytes(num_bytes, expected) -> None:
    assert expected == format_bytes(num_bytes)


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (12, "12 B/s"),
        (1500, "1.50 kB/s"),
        (12.9e9, "12.9 GB/s"),
        (999.7e6, "1000 MB/s"),
        (4.8e12, "4800 GB/s"),
    ],
)
def test_format_rate(rate, expected) -> None:
    """Guards: an accelerator's memory printed as 4.8e+03 GB/s."""
    assert expected == format_rate(rate)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0.0s"),
        (0.84, "0.8s"),
        (59.94, "59.9s"),
        (59.96, "1m00s"),
        (60, "1m00s"),
        (41 * 60 + 12.4, "41m12s"),
        (3599.4, "59m59s"),
        (3599.6, "1h00m"),
        (3 * 3600 + 5 * 60, "3h05m"),
        (100 * 3600, "100h00m"),
    ],
)
def test_format_duration(seconds, expected) -> None:
    """Guards: just under a minute printed as 60.0s."""
    assert expected == format_duration(seconds)


@given(st.integers(0, 2**45))
def test_printed_bytes_read_back_to_three_digits(num_bytes) -> None:
    back = parse_bytes(format_bytes(num_bytes))
    assert abs(back - num_bytes) <= 0.005 * num_bytes + 1


@given(st.floats(0, 1e15, allow_nan=False))
def test_rates_print_without_exponent(rate) -> None:
    assert re.fullmatch(r"[0-9]+(\.[0-9]+)? (B|kB|MB|GB)/s", format_rate(rate))


@given(st.floats(0, 1e7, allow_nan=False))
def test_printed_durations_read_back(seconds) -> None:
    text = format_duration(seconds)
    hours, minutes, rest = (
        float(part or 0)
        for part in re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:([\d.]+)s)?", text).groups()
    )
    assert minutes < 60
    assert rest < 60
    back = hours * 3600 + minutes * 60 + rest
    assert abs(back - seconds) <= (60 if hours else 0.5 if minutes else 0.051)


def test_format_count() -> None:
    assert format_count(46_702_792_704) == "46.7 B"
    assert format_count(5_418_432) == "5.42 M"
    assert format_count(1_500) == "1.5 K"
    assert format_count(812) == "812"
