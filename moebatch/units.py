"""Parse and print quantities: bytes, rates, times. Inside the code only base units are used.

Capacities print in GiB, rates in GB/s: a layer of 2.90 GB is 2.70 GiB, and the two are never mixed.
"""

import re
from fractions import Fraction

from moebatch.errors import UsageError

_FACTORS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12,
    "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
# Digits are bounded: what is longer is no amount of memory, and would not fit a float.
_QUANTITY = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})\s*([a-zA-Z]*)\s*\Z")

_DURATION = re.compile(
    r"(?:(?P<d>[0-9]{1,4})d)?(?:(?P<h>[0-9]{1,6})h)?(?:(?P<m>[0-9]{1,6})m)?"
    r"(?:(?P<s>[0-9]{1,8}(?:\.[0-9]{1,6})?)s?)?"
)
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def parse_bytes(text: str) -> int:
    """Bytes meant by a text such as "14GiB", "500MB" or "6g" (a bare letter is decimal).

    Raises: UsageError when the text is no quantity of bytes.
    """
    match = _QUANTITY.match(text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise UsageError(
            f"{text!r} is not an amount of memory", hint="write it like 6GiB, 500MiB or 16GB"
        )
    return int(Fraction(match.group(1)) * factor)


def parse_duration(text: str) -> float:
    """Seconds meant by a text such as "3h50m", "90s", "1d" or a plain number of seconds.

    Raises: UsageError when the text is no length of time, or none at all.
    """
    match = _DURATION.fullmatch(text.strip())
    parts = match.groupdict() if match else {}
    seconds = sum(float(parts[name] or 0) * factor for name, factor in _SECONDS.items() if match)
    if seconds <= 0:
        raise UsageError(
            f"{text!r} is not a length of time", hint="write it like 3h50m, 90m or 45s"
        )
    return seconds


def format_bytes(num_bytes: float) -> str:
    """A capacity for people: "2.70 GiB", "812 MiB"."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= factor:
            return f"{_three_digits(num_bytes / factor)} {unit}"
    return f"{num_bytes:.0f} B"


def format_rate(bytes_per_s: float) -> str:
    """A bandwidth for people, in powers of ten: "12.9 GB/s"."""
    for unit, factor in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if abs(bytes_per_s) >= factor:
            return f"{_three_digits(bytes_per_s / factor)} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def format_duration(seconds: float) -> str:
    """A time for people: "0.8s", "41m12s", "3h05m"."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def _three_digits(value: float) -> str:
    """Three significant digits, never an exponent: "2.70", "12.9", "4800"."""
    size = abs(value)
    return f"{value:.2f}" if size < 9.995 else f"{value:.1f}" if size < 99.95 else f"{value:.0f}"


def format_count(count: float) -> str:
    """A large number for people: "46.7 B", "5.42 M", "812"."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(count) >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f}"
