"""The lanes of a run's first passes as a picture: which lane did what when."""

from collections.abc import Sequence
from typing import Any

from moebatch.cli.bench import svg
from moebatch.cli.bench.svg import Frame, Picture

_WIDTH, _LANE, _LABEL = 920.0, 34.0, 48.0
# What a task is called, and the class of its colour.
_OPS = {
    "pre_attn": ("projections", "projection"), "post_attn": ("output, router", "output"),
    "cpu_attn": ("attention", "attention"), "gpu_attn": ("attention", "attention"),
    "ffn": ("experts", "experts"), "add_ffn": ("experts", "experts"),
    "load_page": ("weights", "weights"), "stage_page": ("weights, staging", "weights"),
}  # fmt: skip
_OTHER = ("activations and cache", "transfer")
_NAMES = {"cpu": "processor", "disk": "disk", "gpu": "accelerator", "h2d": "to accelerator",
          "d2h": "to host", "stage": "staging"}  # fmt: skip


def lanes(setting: dict[str, Any]) -> str:
    """The timeline of moebatch's first run; empty where none was kept."""
    arm = next((arm for arm in setting["arms"] if arm["name"] == "moebatch" and arm["runs"]), None)
    spans = arm["runs"][0].get("timeline") or [] if arm else []
    if not spans:
        return ""
    names = list(dict.fromkeys(span[0] for span in spans))
    end = max(span[4] + span[5] for span in spans)
    height = 60 + _LANE * len(names) + 50
    picture = Picture(_WIDTH, height, "lanes over time")
    bottom = 40 + _LANE * len(names)
    frame = Frame(left=110, top=40, right=_WIDTH - 20, bottom=bottom,
                  x=svg.linear(0, end, 110, _WIDTH - 20), y=lambda value: value)  # fmt: skip
    for k, name in enumerate(names):
        y = 40 + _LANE * k
        busy = sum(span[5] for span in spans if span[0] == name) / end
        picture.text(100, y + 15, _NAMES.get(name, name), kind="name", anchor="end")
        picture.text(100, y + 28, f"{busy:.0%} busy", kind="tick", anchor="end")
        picture.rect(110, y + 2, _WIDTH - 130, _LANE - 6, kind="lane")
    for lane, op, layer, number, start, seconds in spans:
        x = frame.x(start)
        picture.rect(x, 42 + _LANE * names.index(lane), frame.x(start + seconds) - x, _LANE - 6,
                     kind=f"span {_OPS.get(op, _OTHER)[1]}",
                     title=f"{_OPS.get(op, (op,))[0]}, layer {layer}, pass {number}: "
                     f"{seconds * 1e3:.2f} ms")  # fmt: skip
    _passes(picture, frame, spans)
    svg.axes(picture, frame, x_ticks=svg.ticks(end, 8), y_ticks=[], y_title="",
             x_words=lambda s: f"{s:g}", y_words=str, x_title="seconds")  # fmt: skip
    return picture.render()


def _passes(picture: Picture, frame: Frame, spans: Sequence[Sequence[Any]]) -> None:
    """Where each pass begins; the first ones carry prompts."""
    free = 0.0  # where the next label has room
    for number in sorted({span[3] for span in spans}):
        x = frame.x(min(span[4] for span in spans if span[3] == number))
        picture.line([(x, frame.top - 6), (x, frame.bottom)], kind="pass")
        if x >= free:
            picture.text(x + 3, frame.top - 8, f"pass {number}", kind="tick")
            free = x + _LABEL


def legend(setting: dict[str, Any]) -> list[tuple[str, str]]:
    """(class, words) of the operations that the timeline shows."""
    arm = next((arm for arm in setting["arms"] if arm["name"] == "moebatch" and arm["runs"]), None)
    spans = arm["runs"][0].get("timeline") or [] if arm else []
    found = {_OPS.get(span[1], _OTHER)[1]: _OPS.get(span[1], _OTHER)[0] for span in spans}
    return list(found.items())
