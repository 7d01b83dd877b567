"""What the shipped scripted engine answers, how long it takes, and which faults it meets."""

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.base import Config, Count, Fraction, Items

_TEXT_KEY = re.compile(r"^(\*|\d+)(/\d+)?\Z")
_READ_BY = {"accuracy": "answer", "texts": "fixed", "lengths": "random"}
"""Key of a script -> the mode that reads it."""


class FaultScript(Config):
    """A fault to meet, once or at every call of its number."""

    kind: Literal["raise", "exit", "hang", "slow_row"]
    """An exception, the end of the process, a call that does not return, or one response that takes long."""
    generation: Count = 1
    """In which `generate` call of this engine; the first is 1."""
    after_rows: Annotated[int, Field(ge=0)] = 0
    """Rows finished before it happens."""
    engine: Annotated[int, Field(ge=0)] | None = None
    """Rank of the process it happens in; any when left out."""
    seconds: Annotated[float, Field(ge=0.0)] = 3600.0
    """Of `hang`, and of the delay of the last row of `slow_row`."""
    marker: str | None = None
    """A file that is made when the fault happens; while it exists the fault does not happen again."""


class Script(Config):
    """What a scripted engine answers."""

    mode: Literal["random", "answer", "fixed"] = "random"
    """`random`: tokens by seed. `answer`: the reference answer with probability `accuracy`, else a wrong one.
    `fixed`: `texts` by the prompt's index."""
    accuracy: Fraction = 0.5
    """Of `answer`: the share of prompts answered right."""
    texts: dict[str, str] = Field(default_factory=dict)
    """Prompt index (as a string) -> response; the key `*` serves all others, `INDEX/2` and `*/2` the second turn."""
    min_length: Count = 1
    max_length: Count = 16
    """Of `random` responses, stop token included; `max_response_length` cuts them."""
    lengths: Literal["uniform", "long_tail", "one_long"] = "uniform"
    """`long_tail`: most near `min_length`, one in fifty near `max_length`. `one_long`: the first row of each rollout
    has `max_length`, all others `min_length`."""
    by_token: bool = False
    """A step takes the time of one token, as a real engine's does; else it lasts until a response ends."""
    faults: Items[FaultScript] = ()
    """What goes wrong, and when."""

    @model_validator(mode="after")
    def _can_answer(self) -> "Script":
        if self.min_length > self.max_length:
            raise ValueError(f"min_length is {self.min_length} and max_length {self.max_length}; raise max_length")
        if self.mode == "fixed" and not self.texts:
            raise ValueError("mode is 'fixed' and texts is empty; give a text for each prompt's index, or one for '*'")
        for key in self.texts:
            if not _TEXT_KEY.match(key):
                raise ValueError(f"texts has {key!r}; a key is a prompt's index or '*', with '/2' behind for turn two")
        return self

    @model_validator(mode="after")
    def _is_read(self) -> "Script":
        for key, mode in _READ_BY.items():
            if (
                key in self.model_fields_set
                and getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True)
                and self.mode != mode
            ):
                raise ValueError(f"{key} is set and mode is {self.mode!r}, which does not read it; use mode: {mode}")
        return self


class ScriptedConfig(Config):
    """The shipped scripted engine: given responses with given delays, no model."""

    responses: Script = Script()
    """What it answers."""
    seconds_per_token: Annotated[float, Field(ge=0.0)] = 0.0
    """Of each running response; they run side by side."""
