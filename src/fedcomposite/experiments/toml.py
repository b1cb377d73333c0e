"""Experiment files as text: finding them, reading them, overriding fields, and saying what is wrong with them."""

from __future__ import annotations

import tomllib
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError

from fedcomposite._validation import UserError, suggest
from fedcomposite.data.databases import located

T = TypeVar("T")
_LARGEST = 2**63 - 1  # TOML's integers have 64 bits


class ConfigError(UserError):
    """A configuration that cannot be run; the message has one line per mistake, which names the place."""

    @classmethod
    def of(cls, mistakes: Sequence[str], where: str, first: ConfigError | None = None) -> ConfigError:
        """One error for all the mistakes of a file, after those that were found first."""
        lines = [f"{where}: {line}" for mistake in mistakes for line in mistake.splitlines()]
        return cls("\n".join(dict.fromkeys([*([] if first is None else str(first).splitlines()), *lines])))

    @classmethod
    def at(cls, place: str, error: Exception | str) -> ConfigError:
        """The lines of an error, each with its place."""
        return cls("\n".join(f"{place} {line}" for line in str(error).splitlines()))


def every(makers: Sequence[Callable[[], T]]) -> list[T]:
    """What all of these make, or one error for all that is wrong."""
    made, wrong = [], []
    for maker in makers:
        try:
            made.append(maker())
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError("\n".join(wrong))
    return made


def name_in(fields: Mapping[str, Any]) -> str:
    """The name in a section, which must be there and be one."""
    if "name" not in fields:
        raise ConfigError("needs a name")
    if not isinstance(fields["name"], str):
        raise ConfigError(f"name = {fields['name']!r}, must be a string")
    return fields["name"]


def shipped() -> dict[str, str]:
    """The package's own experiments: name and first comment line."""
    folder = resources.files("fedcomposite.experiments") / "configs"
    found = {
        p.name.removesuffix(".toml"): p.read_text(encoding="utf-8")
        for p in folder.iterdir()
        if p.name.endswith(".toml")
    }
    return {k: found[k].splitlines()[0].lstrip("# ") for k in sorted(found)}


def locate(source: str | Path) -> Path:
    """Find a config file by path, or by the name of a shipped one."""
    path = Path(source)
    if path.is_file():
        return path
    own = Path(str(resources.files("fedcomposite.experiments"))) / "configs" / f"{source}.toml"
    if path.suffix == "" and own.is_file():
        return own
    hint = suggest(str(source), shipped())
    raise ConfigError(
        f"{source}: no such file, and no shipped experiment of that name{hint} (shipped: {', '.join(shipped())})"
    )


def read_text(path: Path) -> str:
    """A file's text; some editors put a byte order mark before it."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def parse(path: Path) -> dict[str, Any]:
    """The content of a TOML file."""
    try:
        return tomllib.loads(read_text(path))
    except ConfigError:
        raise
    except ValueError as error:  # also an integer of thousands of digits
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def load(source: str | Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], str]:
    """The content of a file, or of a shipped one, with ``section.field=value`` overrides; and the file's name."""
    path = locate(source)
    content = parse(path)
    for wish in overrides:
        override(content, wish)
    base = path.parent.absolute()  # the resolved file lies elsewhere
    section = content.get("data")
    if isinstance(section, dict) and isinstance(section.get("databases"), dict):
        content["data"] = located(section, base)
    for found in file_tables(content.get("data")):
        found["files"] = [str(base / str(f)) for f in found["files"]]
        if isinstance(found.get("test"), str):
            found["test"] = str(base / found["test"])
    return with_times(content), path.name


def overridden(text: str, source: Path, overrides: Sequence[str]) -> str:
    """An experiment's text with ``section.field=value`` overrides."""
    if not overrides:
        return text
    content = parse(source)
    for wish in overrides:
        override(content, wish)
    return tomli_w.dumps(content)


def by_new_names(content: Mapping[str, Any]) -> dict[str, Any]:
    """An experiment with what had another place in the last version where it is now, and a warning that says so."""
    section, problem = content.get("data"), content.get("problem", {})
    if not (isinstance(section, Mapping) and "class_weights" in section and isinstance(problem, Mapping)):
        return dict(content)
    warnings.warn("[data] class_weights is now class_weight of [problem]", DeprecationWarning, stacklevel=2)
    kept = {key: value for key, value in section.items() if key != "class_weights"}
    return {**content, "data": kept, "problem": {"class_weight": section["class_weights"], **problem}}


def is_number(word: str) -> bool:
    """Whether a key of a table is a number."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def with_times(content: Mapping[str, Any]) -> dict[str, Any]:
    """An experiment about times to an event in the common words: its event is the target, a recipe has its times."""
    made, section = dict(content), content.get("data")
    if not isinstance(section, Mapping):
        return made
    section = dict(section)
    if "event" in section:
        if "target" in section:
            raise ConfigError("[data] event is the target of times: give one of them")
        section["target"] = section.pop("event")
    if isinstance(recipe := content.get("recipe"), Mapping):
        moved = {key: section.pop(key) for key in ("time", "entry", "strata") if key in section}
        made["recipe"] = {**recipe, **moved}
    return {**made, "data": section}


def file_tables(section: Any) -> list[dict[str, Any]]:
    """``[data]`` where it names files, or each such table of a grid of them."""
    if not isinstance(section, dict):
        return []
    tables = section["grid"] if isinstance(section.get("grid"), list) else [section]
    return [t for t in tables if isinstance(t, dict) and isinstance(t.get("files"), list)]


def override(content: dict[str, Any], wish: str) -> None:
    """Apply ``section.field=value``; the value is TOML, or a bare string."""
    key, separator, text = wish.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {wish}: expected section.field=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        value = text.strip()
    place: Any = content
    *path, last = key.strip().split(".")
    for part in path:
        if isinstance(place, list):
            if not part.isdigit() or int(part) >= len(place):
                raise ConfigError(f"--set {wish}: {part!r} is not a position in a list of {len(place)}")
            place = place[int(part)]
        else:
            place = place.setdefault(part, {})
        if not isinstance(place, dict | list):
            raise ConfigError(f"--set {wish}: {part!r} is not a section")
    if isinstance(place, list):
        raise ConfigError(f"--set {wish}: name a field of one of the {len(place)} entries, as in algorithms.0.step=0.1")
    place[last] = value


def explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Every problem of a validation, each in one line."""
    return [_line(problem, model) for problem in error.errors()]


def sound(content: Mapping[str, Any], error: ValidationError, filler: Mapping[str, Any]) -> dict[str, Any]:
    """The content without the fields that a validation refused, or without their sections where these are no tables.

    ``filler`` has what cannot be left out.
    """
    made = dict(content)
    for section, *place in (problem["loc"] for problem in error.errors()):
        table, key = made.get(str(section)), str(place[0]) if place else ""
        if place and isinstance(table, Mapping) and key in {*table, *filler.get(str(section), {})}:
            made[str(section)] = {**{k: v for k, v in table.items() if k != key}, **_one(filler, str(section), key)}
        else:
            made.pop(str(section), None)
    return made


def _one(filler: Mapping[str, Any], section: str, key: str) -> dict[str, Any]:
    found = filler.get(section, {})
    return {key: found[key]} if key in found else {}


def _line(problem: Any, model: type[BaseModel]) -> str:
    *sections, last = [str(p) for p in problem["loc"]] or ["?"]
    where = f"[{'.'.join(sections)}] {last}" if sections else last
    if problem["type"] == "extra_forbidden":
        known: Any = model
        for part in sections:
            hint = known.model_fields[part].annotation
            known = next((a for a in typing.get_args(hint) if isinstance(a, type) and issubclass(a, BaseModel)), hint)
        names = list(known.model_fields)
        return f"{where} is not a known field{suggest(last, names)} (known: {', '.join(names)})"
    if problem["type"] == "missing":
        return f"{where} is missing"
    return f"{where} = {_short(problem['input'])}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def oversized(content: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Integers that no field can hold: where each is, and the line that says so."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from oversized(value, (*path, str(key)))
    elif isinstance(content, list):
        for number, value in enumerate(content):
            yield from oversized(value, (*path, str(number)))
    elif isinstance(content, int) and abs(content) > _LARGEST:
        *sections, last = path
        where = f"[{'.'.join(sections)}] {last}" if sections else last
        yield path, f"{where} is an integer of {len(str(abs(content)))} digits; a number this large needs a point or e"


def difference(stored: Mapping[str, Any], wanted: Mapping[str, Any], path: str = "") -> str | None:
    """The first field in which two configurations differ, with both values; None if there is none."""
    for key in dict.fromkeys([*wanted, *stored]):
        one, other, where = stored.get(key), wanted.get(key), f"{path}{key}"
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            if found := difference(one, other, f"{where}."):
                return found
        elif one != other or isinstance(one, bool) != isinstance(other, bool):
            absent = "not given"
            return (
                f"{where} = {absent if one is None else _short(one)}, not {absent if other is None else _short(other)}"
            )
    return None
