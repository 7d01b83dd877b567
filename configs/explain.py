"""Turns validation errors into lines a person can act on: path, value, rule, nearest known key."""

import difflib
import functools
import typing
from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from configs.problems import MISSING, UNSAID, ConfigError, Problem
from configs.run import RunConfig

WORDS_OF_OTHERS = {
    "learning_rate": "actor.optimizer.lr",
    "lora_r": "model.lora.rank",
    "num_epochs": "algorithm.num_ppo_epochs",
    "ppo_epochs": "algorithm.num_ppo_epochs",
    "clip_ratio": "algorithm.clip_ratio_low",
    "clip_range": "algorithm.clip_ratio_low",
    "train_batch_size": "data.prompts_per_iteration",
    "num_generations": "rollout.group_size",
    "n": "rollout.group_size",
    "beta": "algorithm.kl.coef",
    "total_epochs": "iterations",
    "max_new_tokens": "rollout.max_response_length",
}
"""What the same thing is called elsewhere, where the spelling alone would not lead here."""

_CLOSE = 0.72
"""Likeness from which a suggestion helps; below it only misleads."""
_SAME_SECTION = 0.06
"""A key of the section in which the mistake was made is the likelier meaning."""


def nearest(word: str, known: Sequence[str]) -> str | None:
    """The known word most like `word`, None when none is close."""
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=_CLOSE)
    return close[0] if close else None


def explain(error: ValidationError) -> list[Problem]:
    """Every error as a Problem, in the order of the config's keys."""
    problems: list[Problem] = []
    every = error.errors(include_url=False)
    for details in every:
        inner = [other for other in every if len(other["loc"]) > len(details["loc"]) == len(_shared(other, details))]
        if details["type"] == "too_short" and inner:
            continue  # The list is short only because its entries were refused, each with a line of its own.
        problems.extend(_explain_one(details))
    return problems


def _shared(one: ErrorDetails, other: ErrorDetails) -> list[str | int]:
    return [a for a, b in zip(one["loc"], other["loc"], strict=False) if a == b]


def _explain_one(details: ErrorDetails) -> Iterator[Problem]:
    location = tuple(part for part in details["loc"] if part != "[key]")
    path = ".".join(str(part) for part in location) or "config"
    value: object = details["input"]
    kind, message = details["type"], details["msg"]
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        yield from cause.problems
    elif kind == "extra_forbidden":
        hint = suggest(location)
        yield Problem(path, value, "there is no such key", f"did you mean {hint}?" if hint else _keys_of(location[:-1]))
    elif kind == "missing":
        yield Problem(path, MISSING, "it has no default", f"add {path}")
    elif kind == "value_error":
        yield Problem(path, UNSAID, message.removeprefix("Value error, "))
    elif kind == "literal_error":
        expected = [
            word.strip(" '") for word in message.removeprefix("Input should be ").replace(" or ", ", ").split(",")
        ]
        close = nearest(str(value), expected)
        yield Problem(
            path,
            value,
            "it must be one of " + ", ".join(expected),
            f"did you mean {close}?" if close else "pick one of them",
        )
    elif kind == "model_type":
        yield Problem(path, value, "it must be a section of keys", _keys_of(location))
    elif kind == "tuple_type":
        yield Problem(path, value, "it must be a list", f"write [{value}]" if isinstance(value, str | int) else "")
    elif kind == "too_short":
        least = details.get("ctx", {}).get("min_length", 1)
        yield Problem(path, value, f"it must have at least {least} entries", _documented(location))
    elif kind.endswith("_type"):
        wanted = message.removeprefix("Input should be ").removeprefix("a valid ")
        article = "an" if wanted[0] in "aeiou" else "a"
        yield Problem(path, value, f"it must be {article} {wanted}, and nothing is converted", _untyped(value))
    else:
        yield Problem(
            path,
            value,
            message.replace("Input should", "it must").replace("String should", "it must"),
            _documented(location),
        )


def _documented(location: tuple[str | int, ...]) -> str:
    """The line that stands under the field, which says what its extremes do."""
    section = _section_at(location[:-1])
    name = str(location[-1]) if location else ""
    if section is None or name not in section.model_fields:
        return ""
    description = section.model_fields[name].description
    return " ".join(description.split()) if description else ""


def _untyped(value: object) -> str:
    if isinstance(value, str):
        return "numbers and true/false stand without quotes"
    if isinstance(value, bool):
        return "write a number, not true or false"
    return "write it in that type"


def suggest(location: tuple[str | int, ...]) -> str | None:
    """The known path that an unknown key most likely means.

    >>> suggest(("algorithm", "kl_coeff"))
    'algorithm.kl.coef'
    """
    word = str(location[-1]).lower().replace("-", "_")
    section = ".".join(str(part) for part in location[:-1])
    best, best_score = None, _CLOSE
    for path in [*_local_paths(location[:-1]), *known_paths()]:
        segments = path.split(".")
        names = (segments[-1], "_".join(segments[-2:]))
        score = max(difflib.SequenceMatcher(None, word, name).ratio() for name in names)
        score += _SAME_SECTION if path.startswith(section + ".") or (not section and len(segments) == 1) else 0.0
        if score > best_score:
            best, best_score = path, score
    if word in WORDS_OF_OTHERS and best_score < 1.0:
        return WORDS_OF_OTHERS[word]
    return _begun_by(location) or best


def _begun_by(location: tuple[str | int, ...]) -> str | None:
    """The one key of the same section that begins with the word: `targets` for `target_modules`."""
    begin, section = str(location[-1]).lower().rstrip("s"), _section_at(location[:-1])
    keys = [key for key in section.model_fields if key.startswith(f"{begin}_")] if section is not None else []
    return ".".join([*map(str, location[:-1]), keys[0]]) if len(keys) == 1 else None


@functools.cache
def known_paths() -> tuple[str, ...]:
    """Every key of the schema as a dotted path; `*` stands for a name or an index of the user's."""
    return tuple(_paths_below(RunConfig, ""))


def _paths_below(section: type[BaseModel], prefix: str) -> Iterator[str]:
    inner: list[tuple[str, type[BaseModel]]] = []
    for name, field in section.model_fields.items():
        yield prefix + name
        for annotation, star in _flatten(field.annotation, ""):
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                inner.append((f"{prefix}{name}.{star}", annotation))
    for inner_prefix, inner_section in inner:
        yield from _paths_below(inner_section, inner_prefix)


def _local_paths(location: tuple[str | int, ...]) -> Iterator[str]:
    section = _section_at(location)
    if section is not None:
        prefix = ".".join(str(part) for part in location)
        yield from _paths_below(section, prefix + "." if prefix else "")


def _keys_of(location: tuple[str | int, ...]) -> str:
    section = _section_at(location)
    return "its keys are " + ", ".join(section.model_fields) if section else "remove it"


def _section_at(location: tuple[str | int, ...]) -> type[BaseModel] | None:
    here: Any = RunConfig
    for part in location:
        here = _inside(here, part)
    for annotation, _ in _flatten(here, ""):
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
    return None


def _inside(annotation: Any, part: str | int) -> Any:
    for candidate, star in _flatten(annotation, ""):
        if star:
            return candidate
        if isinstance(candidate, type) and issubclass(candidate, BaseModel) and part in candidate.model_fields:
            return candidate.model_fields[str(part)].annotation
    return None


def _flatten(annotation: Any, star: str) -> Iterator[tuple[Any, str]]:
    """The plain types an annotation may hold, with "*." where a name or an index comes between."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        yield from _flatten(arguments[0], star)
    elif origin in (typing.Union, UnionType):
        for argument in arguments:
            if argument is not NoneType:
                yield from _flatten(argument, star)
    elif origin is tuple:
        yield from _flatten(arguments[0], "*.")
    elif origin is dict:
        yield from _flatten(arguments[1], "*.")
    elif annotation is not None:
        yield annotation, star
