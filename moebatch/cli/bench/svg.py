"""Small pictures as SVG text: shapes, axes, scales. Colours are classes: the page's style decides."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10

Scale = Callable[[float], float]


@dataclass(slots=True)
class Picture:
    """An SVG that is being drawn; y grows downwards, units are pixels at the usual size."""

    width: float
    height: float
    label: str
    parts: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, *, kind: str,
             title: str = "", style: str = "") -> None:  # fmt: skip
        """A filled box; `title` shows under the pointer."""
        body = f"<title>{escape(title)}</title>" if title else ""
        tail = f">{body}</rect>" if body else "/>"
        self.parts.append(
            f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" width="{_n(max(width, 0.5))}" '
            f'height="{_n(max(height, 0.5))}"{_style(style)}{tail}'
        )

    def line(self, points: Sequence[tuple[float, float]], *, kind: str, title: str = "") -> None:
        """A line through points."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        body = f"><title>{escape(title)}</title></polyline>" if title else "/>"
        self.parts.append(f'<polyline class="{kind}" points="{path}"{body}')

    def dot(self, x: float, y: float, *, kind: str, radius: float = 5, title: str = "") -> None:
        """A measured point."""
        body = f"><title>{escape(title)}</title></circle>" if title else "/>"
        self.parts.append(
            f'<circle class="{kind}" cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}"{body}'
        )

    def text(
        self, x: float, y: float, words: str, *, kind: str = "", anchor: str = "start"
    ) -> None:
        """Words; `anchor` is start, middle or end."""
        place = f'x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}"'
        self.parts.append(f'<text class="{kind}" {place}>{escape(words)}</text>')

    def render(self) -> str:
        """The whole picture; it shrinks with the page."""
        return (
            f'<svg viewBox="0 0 {_n(self.width)} {_n(self.height)}" role="img" '
            f'aria-label="{escape(self.label, quote=True)}">{"".join(self.parts)}</svg>'
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The part of a picture in which data are drawn, with the scales of both axes."""

    left: float
    top: float
    right: float
    bottom: float
    x: Scale
    y: Scale


def linear(low: float, high: float, first: float, last: float) -> Scale:
    """Values low..high to positions first..last."""
    span = (high - low) or 1.0
    return lambda value: first + (value - low) / span * (last - first)


def logarithmic(low: float, high: float, first: float, last: float) -> Scale:
    """The same on the logarithm; values must be positive."""
    inner = linear(log10(low), log10(high), first, last)
    return lambda value: inner(log10(value))


def ticks(high: float, count: int = 5, low: float = 0.0) -> list[float]:
    """Round values from low to high, about `count` of them."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    unit = 10.0 ** floor(log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw)
    first = ceil(low / step)
    return [k * step for k in range(first, floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten within a range."""
    return [10.0**k for k in range(ceil(log10(low)), floor(log10(high)) + 1)]


def axes(picture: Picture, frame: Frame, *, x_ticks: Sequence[float], y_ticks: Sequence[float],
         x_words: Callable[[float], str], y_words: Callable[[float], str], x_title: str,
         y_title: str) -> None:  # fmt: skip
    """Grid lines, tick labels and titles."""
    for value in y_ticks:
        y = frame.y(value)
        picture.line([(frame.left, y), (frame.right, y)], kind="grid")
        picture.text(frame.left - 8, y + 4, y_words(value), kind="tick", anchor="end")
    for value in x_ticks:
        x = frame.x(value)
        picture.line([(x, frame.bottom), (x, frame.bottom + 4)], kind="axis")
        picture.text(x, frame.bottom + 18, x_words(value), kind="tick", anchor="middle")
    picture.line([(frame.left, frame.bottom), (frame.right, frame.bottom)], kind="axis")
    middle = (frame.left + frame.right) / 2
    picture.text(middle, frame.bottom + 36, x_title, kind="title", anchor="middle")
    picture.text(frame.left, frame.top - 10, y_title, kind="title")


def _n(value: float) -> str:
    """A coordinate with a tenth of a pixel."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


def _style(style: str) -> str:
    return f' style="{style}"' if style else ""
