"""What every section of the configuration shares: frozen, strict, and closed to unknown keys.

Strict means that `true` is never 1 and "4" is never 4; a mistake stops at the first line of the run,
not after an hour of it. The only conversion made is YAML's list to a tuple.
"""

import os
from typing import Annotated, Any, TypeVar, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def _as_tuple(value: Any) -> Any:
    return tuple(cast("list[object]", value)) if isinstance(value, list) else value


class Config(BaseModel):
    """A section of the configuration."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


T = TypeVar("T")

Items = Annotated[tuple[T, ...], BeforeValidator(_as_tuple)]
"""A sequence that cannot change; YAML's list is accepted."""

PositiveInts = Items[Annotated[int, Field(gt=0)]]
"""Counts; that there is one at all is checked by the owner."""

Strings = Items[str]

TokenIds = Items[Annotated[int, Field(ge=0)]]
"""Ids of a tokenizer; that it has them is checked where it is loaded."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)]
"""Of something that processes, reservations and files are named after: no spaces, no slashes, not empty."""

Folder = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
"""A path on this machine; `~` is the user's home, as in a shell."""

PathOrName = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path on this machine, as `Folder` reads it, or a name under which something is known elsewhere."""

Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""What a generator of random numbers takes: a whole number of 64 bits."""

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
"""A share between 0 and 1."""

Count = Annotated[int, Field(ge=1, le=10**9)]
"""At least one; more than a billion is a slip of the hand."""

RowCount = Annotated[int, Field(ge=1, le=10**6)]
"""Prompts of an iteration, or responses to one."""

Seconds = Annotated[float, Field(ge=0.01, le=10**7)]
"""A time limit: less than a hundredth of a second would mean 'fail at once', more than 115 days never."""
