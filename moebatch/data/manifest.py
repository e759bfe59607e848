"""manifest.json: which run an output belongs to, and whether this run is the same one."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moebatch.data import durable

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One start of the command. `numeric` is known once the engine is needed: how it computes."""

    started_at: str
    argv: tuple[str, ...]
    cwd: str
    numeric: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The identity of a run. `fingerprint` must be equal for a run to go on.

    `run_id` and `created` (seconds since 1970) stand in output rows, so they outlive a session.
    """

    run_id: str
    created: int
    fingerprint: Mapping[str, Any]
    sessions: tuple[Session, ...] = ()

    def differences(self, fingerprint: Mapping[str, Any]) -> list[str]:
        """One text for each field in which another fingerprint differs from ours."""
        return differences(self.fingerprint, fingerprint)

    def with_session(self, session: Session) -> "Manifest":
        """The manifest with one more session."""
        return replace(self, sessions=(*self.sessions, session))

    def with_numeric(self, numeric: Mapping[str, str]) -> "Manifest":
        """The manifest with the numeric class of the last session filled in."""
        last = replace(self.sessions[-1], numeric=dict(numeric))
        return replace(self, sessions=(*self.sessions[:-1], last))

    def numeric(self) -> Mapping[str, str] | None:
        """The numeric class of the last session that computed something."""
        known = [session.numeric for session in self.sessions if session.numeric is not None]
        return known[-1] if known else None

    def write(self, path: Path) -> None:
        """Write it in one step.

        Raises: OutputWriteError.
        """
        text = json.dumps({"schema_version": _VERSION, **asdict(self)}, indent=2) + "\n"
        try:
            durable.write_whole(path, [text.encode()])
        except OSError as error:
            raise durable.write_error(path, error) from error


def read_manifest(path: Path) -> Manifest | None:
    """The manifest in a file; None where there is none that can be understood."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        if said.pop("schema_version") != _VERSION:
            return None
        sessions = tuple(
            Session(**{**one, "argv": tuple(one["argv"])}) for one in said.pop("sessions")
        )
        return Manifest(**said, sessions=sessions)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One text for each field that differs, nested ones by their own name."""
    one, other = dict(_flat(before)), dict(_flat(now))
    return [
        f"{name} was {_shown(one.get(name))}, is {_shown(other.get(name))}"
        for name in dict.fromkeys((*one, *other))
        if _plain(one.get(name)) != _plain(other.get(name))
    ]


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    return json.loads(json.dumps(value))


def _shown(value: Any) -> str:
    text = "not set" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:36] + "…"
