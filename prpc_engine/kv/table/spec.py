"""Plain dicts that name a thing and its settings, turned into frozen dataclasses, or refused by
name.

    {"name": "adagrad", "learning_rate": 0.05}  ->  Adagrad(learning_rate=0.05)

Such dicts come from a configuration file or from another process, so every mistake in them is a
ConfigError that says what was given and what is allowed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TypeVar

from prpc_engine.errors import ConfigError

Thing = TypeVar("Thing")


def build(what: str, classes: Mapping[str, type[Thing]], spec: object) -> Thing:
    """Make classes[spec["name"]] from the other entries of `spec`. An instance of one of the
    classes passes as it is.

    `what` ("optimizer") begins every message. Raises ConfigError for anything that is not exactly
    such a dict; what a class checks in its __post_init__ it raises itself.
    """
    for each in classes.values():
        if isinstance(spec, each):
            return spec
    names = ", ".join(sorted(classes))
    if not isinstance(spec, Mapping):
        raise ConfigError(
            f'{what} {spec!r}: a dict with a "name" is allowed, where name is one of: {names}'
        )
    name = spec.get("name")
    if not isinstance(name, str) or name not in classes:
        raise ConfigError(f"{what} {spec!r}: the name {name!r} is not known; allowed: {names}")
    return configured(
        f"{what} {name!r}",
        classes[name],
        {key: value for key, value in spec.items() if key != "name"},
    )


def configured(what: str, made: type[Thing], settings: object) -> Thing:
    """made(**settings); an instance of it passes as it is. Raises ConfigError as build() does."""
    if isinstance(settings, made):
        return settings
    fields = {field.name: field for field in dataclasses.fields(made)}  # type: ignore[arg-type]
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"{what} is {settings!r}; a dict of its settings is allowed: {', '.join(fields)}"
        )
    for key in settings:
        if key not in fields:
            raise ConfigError(
                f"{what} has no setting {key!r}; allowed: {', '.join(fields) or 'none'}"
            )
    for key, field in fields.items():
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if required and key not in settings:
            raise ConfigError(
                f"{what} needs the setting {key!r}; its settings are: {', '.join(fields)}"
            )
    try:
        return made(**settings)
    except ConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
        # of a value of a kind that nobody thought of
        raise ConfigError(f"{what}: its settings {settings!r} are not allowed: {error}") from error


def checked_number(
    what: str, value: object, *, at_least: float = -math.inf, above: float = -math.inf
) -> float:
    """`value` as a finite float within the bounds, or ConfigError. True and False are no numbers
    here.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
        if math.isfinite(number) and number >= at_least and number > above:
            return number
    bound = f" of at least {at_least:g}" if at_least > -math.inf else ""
    bound += f" above {above:g}" if above > -math.inf else ""
    raise ConfigError(f"{what} is {value!r}; a finite number{bound} is allowed")


def checked_count(what: str, value: object, *, at_least: int, at_most: int) -> int:
    """`value` as an int within the bounds, or ConfigError."""
    if isinstance(value, int) and not isinstance(value, bool) and at_least <= value <= at_most:
        return value
    raise ConfigError(
        f"{what} is {value!r}; a whole number from {at_least} to {at_most} is allowed"
    )
