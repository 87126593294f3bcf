"""What the checkers report, and what a kernel's author has argued away."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path


@dataclass(frozen=True)
class Site:
    """Where something happened: who did it, at which PTX line, from which line of the program."""

    who: str
    line: int = 0
    source: str | None = None

    def __str__(self) -> str:
        place = f" at PTX line {self.line}" if self.line else ""
        return f"{self.who}{place}" + (f" ({self.source})" if self.source else "")


@dataclass(frozen=True)
class Finding:
    """One kind of fault at one pair of places; `count` says how often it was seen."""

    kind: str  # e.g. "race", "missing proxy fence", "uninitialised read", "leak"
    message: str
    site: Site | None = None
    other: Site | None = None
    kernel: str = ""
    location: str = ""  # address or cell of the first occurrence
    count: int = 1

    def __str__(self) -> str:
        places = " against ".join(str(site) for site in (self.site, self.other) if site)
        seen = f", seen {self.count} times" if self.count > 1 else ""
        return (
            f"{self.kind}: {self.message}"
            + (f": {places}" if places else "")
            + (f", first at {self.location}" if self.location else "")
            + seen
        )


@dataclass
class Findings:
    """A list without repetitions: findings of one kind at the same PTX lines are one."""

    known: dict[tuple, Finding] = field(default_factory=dict)

    def add(self, finding: Finding) -> None:
        lines = tuple(site.line if site else None for site in (finding.site, finding.other))
        key = (finding.kernel, finding.kind, lines if any(lines) else finding.message)
        earlier = self.known.get(key)
        self.known[key] = replace(earlier, count=earlier.count + 1) if earlier else finding

    def __iter__(self):
        return iter(self.known.values())

    def __len__(self) -> int:
        return len(self.known)


@dataclass(frozen=True)
class Suppression:
    """A finding that is known, with the reason why it is none."""

    kernel: str  # regular expressions, searched for
    kind: str
    text: str
    reason: str

    def covers(self, finding: Finding) -> bool:
        return bool(
            re.search(self.kernel, finding.kernel)
            and re.search(self.kind, finding.kind)
            and re.search(self.text, str(finding))
        )


def read_suppressions(path: Path) -> list[Suppression]:
    """Tables [[suppression]] with kernel, kind, text and reason of a TOML file.

    Raises:
        ValueError: an entry without a reason, or with an unknown key.
    """
    suppressions = []
    for entry in tomllib.loads(path.read_text()).get("suppression", []):
        if set(entry) != {"kernel", "kind", "text", "reason"} or not entry["reason"].strip():
            raise ValueError(f"{path}: a suppression needs kernel, kind, text and a reason, got {entry}")
        suppressions.append(Suppression(**entry))
    return suppressions
