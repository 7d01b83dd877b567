"""Rows of one prompt source: files, hub data sets, reasoning-gym, a function of yours, and two tasks generated here.

Generated tasks keep a tenth of their space for validation, chosen by a hash of the prompt, so that no training row is
ever a validation row whatever the seeds and sizes are.
"""

import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from configs.data import DEFAULT_SIZE, SourceConfig
from resources.prompt_tables import PromptError, SourceRow, origin_of, rows_of_table

HELD_OUT_PARTS = 10
"""One part in this many of a generated space is held out for validation."""
_ENUMERABLE = 10**6
_MAX_DRAWS_PER_ROW = 1000


def load_rows(source: SourceConfig, *, held_out: bool = False) -> list[SourceRow]:
    """All rows of a source, checked.

    Args:
        source: what to read.
        held_out: take generated kinds from the part of their space that training never sees.

    Raises:
        PromptError: for an empty source, a missing column, or rows whose prompt or answer is null (they are listed).
    """
    if source.kind == "sorting":
        rows = _generated(source, _sorting, held_out)
    elif source.kind == "calculator":
        rows = _generated(source, _calculator, held_out)
    elif source.kind == "reasoning_gym":
        rows = _reasoning_gym(source, held_out)
    else:
        rows = rows_of_table(source, held_out=held_out)
    if not rows:
        raise PromptError(f"source {source.name!r} has no rows; {origin_of(source)} is empty")
    return rows


def is_held_out(prompt: str) -> bool:
    """Whether a generated prompt belongs to validation; a function of its text alone."""
    return zlib.crc32(prompt.encode()) % HELD_OUT_PARTS == 0


# Generated here ------------------------------------------------------------------------------------------------------

Draw = Callable[[random.Random, Mapping[str, Any]], tuple[str, str]]


def _generated(source: SourceConfig, make: "_Task", held_out: bool) -> list[SourceRow]:
    task = make(source)
    wanted = source.size or DEFAULT_SIZE
    rng = random.Random(f"{source.kind}:{source.seed}:{sorted(source.options.items())}")
    prompts: Iterable[str] = task.every(rng) if task.space <= _ENUMERABLE else _draws(task, rng, wanted)
    seen: dict[str, None] = {}
    for prompt in prompts:
        if is_held_out(prompt) == held_out:
            seen.setdefault(prompt)
            if len(seen) == wanted:
                break
    if source.size is not None and len(seen) < wanted:
        part = "held-out" if held_out else "training"
        raise PromptError(
            f"source {source.name!r} asks for {wanted} rows but the {part} part of its space has {len(seen)}; lower "
            "size or "
            f"widen options (space: {task.space} prompts)"
        )
    return [SourceRow(index=index, prompt=prompt, answer=task.solve(prompt)) for index, prompt in enumerate(seen)]


def _draws(task: "_TaskSpace", rng: random.Random, wanted: int) -> Iterator[str]:
    for _ in range(wanted * HELD_OUT_PARTS * _MAX_DRAWS_PER_ROW):
        yield task.draw(rng)


@dataclass(frozen=True, kw_only=True, slots=True)
class _TaskSpace:
    """A generated task: how many prompts there are, one of them by number, and the answer to each."""

    space: int
    prompt_at: Callable[[int], str]
    solve: Callable[[str], str]

    def draw(self, rng: random.Random) -> str:
        return self.prompt_at(rng.randrange(self.space))

    def every(self, rng: random.Random) -> Iterator[str]:
        order = list(range(self.space))
        rng.shuffle(order)
        return map(self.prompt_at, order)


_Task = Callable[[SourceConfig], _TaskSpace]


def _sorting(source: SourceConfig) -> _TaskSpace:
    """`53172=` -> `12357`; option num_digits (5)."""
    digits = _int_option(source, "num_digits", 5, low=1, high=64)
    _no_more_options(source, {"num_digits"})
    return _TaskSpace(
        space=10**digits,
        prompt_at=lambda number: f"{number:0{digits}d}=",
        solve=lambda prompt: "".join(sorted(prompt[:-1])),
    )


def _calculator(source: SourceConfig) -> _TaskSpace:
    """`12+34=` -> `46`; options max_operand (99), operators ("+-*") and num_operands (2).

    Evaluated left to right within the usual precedence; answers may be negative.
    """
    top = _int_option(source, "max_operand", 99, low=1, high=10**9)
    count = _int_option(source, "num_operands", 2, low=2, high=8)
    operators = source.options.get("operators", "+-*")
    _no_more_options(source, {"max_operand", "num_operands", "operators"})
    if not isinstance(operators, str) or not operators or set(operators) - set("+-*"):
        raise PromptError(f"source {source.name!r}: operators is {operators!r}; give some of '+-*' as one string")

    def prompt_at(number: int) -> str:
        number, value = divmod(number, top + 1)
        text = str(value)
        for _ in range(count - 1):
            number, choice = divmod(number, len(operators))
            number, value = divmod(number, top + 1)
            text += f"{operators[choice]}{value}"
        return f"{text}="

    space = (top + 1) ** count * len(operators) ** (count - 1)
    return _TaskSpace(space=space, prompt_at=prompt_at, solve=lambda prompt: str(_evaluate(prompt[:-1])))


def _evaluate(text: str) -> int:
    """Value of a sum of products of whole numbers without signs or brackets."""
    total = 0
    for term in text.replace("-", "+-").split("+"):
        sign, factors = (-1, term[1:]) if term.startswith("-") else (1, term)
        product = sign
        for factor in factors.split("*"):
            product *= int(factor)
        total += product
    return total


def _int_option(source: SourceConfig, name: str, default: int, *, low: int, high: int) -> int:
    value = source.options.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise PromptError(f"source {source.name!r}: {name} is {value!r}; it is a whole number from {low} to {high}")
    return value


def _no_more_options(source: SourceConfig, known: set[str]) -> None:
    unknown = sorted(set(source.options) - known)
    if unknown:
        raise PromptError(
            f"source {source.name!r} of kind {source.kind} has no options {unknown}; it has {sorted(known)}"
        )


def _gym_entries(source: SourceConfig, size: int) -> list[dict[str, Any]]:
    """The first `size` entries of a generated data set. Raises PromptError for options that it refuses."""
    import reasoning_gym

    try:
        dataset = reasoning_gym.create_dataset(str(source.path), size=size, seed=source.seed, **source.options)
        return [dataset[index] for index in range(size)]
    except (AssertionError, TypeError, ValueError) as error:  # its ways to refuse an option
        raise PromptError(
            f"source {source.name!r}: reasoning-gym's {source.path} refuses options {source.options} with size {size} "
            f"and seed {source.seed} ({type(error).__name__}: {error}); correct data.sources[].options"
        ) from error


def _reasoning_gym(source: SourceConfig, held_out: bool) -> list[SourceRow]:
    import reasoning_gym  # several seconds to import, so only where it is used

    wanted = source.size or DEFAULT_SIZE
    known = set(reasoning_gym.factory.DATASETS)
    if source.path not in known:
        raise PromptError(
            f"source {source.name!r}: reasoning-gym has no data set {source.path!r}; it has {sorted(known)[:8]}..."
        )
    share = 1 if held_out else HELD_OUT_PARTS - 1
    drawn = wanted * HELD_OUT_PARTS // share + HELD_OUT_PARTS
    for attempt in range(4):
        entries = {entry["question"]: entry for entry in _gym_entries(source, drawn << attempt)}
        kept = [entry for question, entry in entries.items() if is_held_out(question) == held_out][:wanted]
        if len(kept) == wanted:
            break
    else:
        raise PromptError(
            f"source {source.name!r}: reasoning-gym's {source.path} gave {len(kept)} different prompts of the {wanted} "
            "asked for; lower size"
        )
    return [
        SourceRow(
            index=index,
            prompt=entry["question"],
            answer="" if entry["answer"] is None else str(entry["answer"]),
            extra={"dataset": source.path, "entry": entry},
        )
        for index, entry in enumerate(kept)
    ]
