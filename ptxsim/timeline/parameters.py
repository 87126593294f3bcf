"""A chip's parameters: numbers with their source, and for those that nobody has measured the range they may lie in."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

FOLDER = Path(__file__).parent / "chips"


@dataclass(frozen=True)
class Number:
    """value, low and high in the parameter's own unit; without a range it counts as known."""

    value: float
    source: str
    low: float | None = None
    high: float | None = None

    @property
    def is_assumed(self) -> bool:
        return self.low is not None


@dataclass(frozen=True)
class Chip:
    """A chip; `chip["name"]` is a parameter's value."""

    name: str
    arch: str
    num_sms: int
    numbers: Mapping[str, Number] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return self.numbers[name].value

    def changed(self, **values: float) -> Chip:
        """The same chip with other numbers.

        Raises:
            ValueError: no such parameter.
        """
        unknown = sorted(values.keys() - self.numbers.keys())
        if unknown:
            raise ValueError(f"{self.name} has no parameter {', '.join(unknown)}; it has {', '.join(self.numbers)}")
        changed = {name: replace(self.numbers[name], value=value) for name, value in values.items()}
        return replace(self, numbers={**self.numbers, **changed})

    def drawn(self, rng: random.Random) -> Chip:
        """The same chip with each assumed number drawn uniformly from its range."""
        drawn = {
            name: replace(number, value=rng.uniform(number.low, number.high))
            for name, number in self.numbers.items()
            if number.low is not None and number.high is not None
        }
        return replace(self, numbers={**self.numbers, **drawn})


def chip_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_chip(name: str) -> Chip:
    """A chip by the name of its file.

    A file may build on another one (`base = "b200"`) and then holds what differs.

    Raises:
        ValueError: no such chip, or a parameter without source.
    """
    path = FOLDER / f"{name}.toml"
    if not path.exists():
        raise ValueError(f"chip must be one of {', '.join(chip_names())}, got {name!r}")
    content = tomllib.loads(path.read_text())
    base = load_chip(content["base"]).numbers if "base" in content else {}
    numbers = {key: _number(name, key, fields) for key, fields in content.get("parameters", {}).items()}
    return Chip(name, content["arch"], content["num_sms"], {**base, **numbers})


def _number(chip: str, key: str, fields: Mapping[str, object]) -> Number:
    value, source, span = fields.get("value"), fields.get("source"), fields.get("range")
    if not isinstance(value, int | float) or not isinstance(source, str):
        raise ValueError(f"chip {chip}: parameter {key} needs a value and a source, got {dict(fields)}")
    if span is None:
        return Number(float(value), source)
    if not isinstance(span, list) or len(span) != 2 or not span[0] <= value <= span[1]:
        raise ValueError(f"chip {chip}: the range of {key} must be [low, high] around {value}, got {span}")
    return Number(float(value), source, float(span[0]), float(span[1]))
