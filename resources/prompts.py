"""The prompts of a run: sources mixed by weight, rendered, cut to length, and put in an order that can be resumed.

The order is a pure function of (`data.seed`, epoch); whoever knows (epoch, start) knows the next prompt. So nothing is
stored but those two numbers and the identity of the data, and every rollout rank reads its rows on its own.
"""

import hashlib
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from jinja2 import TemplateError

from configs.data import DataConfig, SourceConfig, ValidationConfig
from resources.prompt_sources import PromptError, SourceRow, load_rows
from resources.seeding import stream_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt, ready for an engine."""

    ordinal: int
    """Position in the whole run: epoch * rows of an epoch + position in the epoch. Never repeats."""
    source: str
    index: int
    """Position in the source."""
    text: str
    """As the source has it; for chat messages their JSON."""
    answer: str
    extra: dict[str, Any]
    ids: tuple[int, ...]
    """What every engine and trainer sees; the only copy that is ever cut."""
    group_size: int | None
    """Responses the source asks for; the config's when None."""

    @property
    def key(self) -> str:
        """Name of the prompt for the curriculum, the same in every epoch."""
        return f"{self.source}:{self.index}"

    def record(self) -> bytes:
        """What graders read, as UTF-8 JSON: prompt, answer, source, index, extra."""
        facts = {
            "prompt": self.text,
            "answer": self.answer,
            "source": self.source,
            "index": self.index,
            "extra": self.extra,
        }
        # Half of a surrogate pair has no UTF-8; with a backslash it is the escape that JSON has for it.
        return json.dumps(facts, ensure_ascii=False, default=str).encode(errors="backslashreplace")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSlice:
    """Some prompts in order, and where the next ones begin."""

    prompts: list[Prompt]
    epoch: int
    start: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rendered:
    source: SourceConfig
    rows: list[SourceRow]
    ids: list[tuple[int, ...]]
    num_filtered: int


@dataclass(slots=True)
class _EpochOrder:
    """Order of one epoch: for each position the source's number and the row's number in it."""

    epoch: int = -1
    source_numbers: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    row_numbers: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))


class PromptSource:
    """All prompts of a config in their order. Cheap to ask, so every rank has one."""

    def __init__(
        self,
        data: DataConfig,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        sources: Sequence[SourceConfig] | None = None,
        held_out: bool = False,
        tools: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Read, check and render everything.

        Args:
            data: rendering, length limit, order and sources.
            tokenizer: of the model.
            sources: in place of `data.sources` (validation).
            held_out: take generated kinds from the part of their space that training never sees.
            tools: schemas that a chat template tells the model of.

        Raises:
            PromptError: for unusable rows, or when fewer rows are left than one iteration takes.
        """
        self._data = data
        self._tokenizer = tokenizer
        self._tools = list(tools) or None
        wanted = data.sources if sources is None else sources
        if not wanted:
            raise PromptError("no source is given; name at least one")
        self._sources = [self._render(source, load_rows(source, held_out=held_out)) for source in wanted]
        self.num_rows = sum(len(rendered.rows) for rendered in self._sources)
        self.num_filtered = sum(rendered.num_filtered for rendered in self._sources)
        self._pattern, self._counts = _mix([r.source.weight for r in self._sources], self.num_rows)
        self._check_shares()
        self._order = _EpochOrder()
        self.identity = self._identity()
        if not held_out and self.num_rows < data.prompts_per_iteration:
            raise PromptError(
                f"{self.num_rows} prompts are left ({self.num_filtered} were filtered out) but "
                "data.prompts_per_iteration is "
                f"{data.prompts_per_iteration}; add rows, lower prompts_per_iteration, or raise data.max_prompt_length "
                f"({data.max_prompt_length})"
            )

    @classmethod
    def for_validation(
        cls,
        validation: ValidationConfig,
        data: DataConfig,
        tokenizer: "PreTrainedTokenizerBase",
        tools: Sequence[dict[str, Any]] = (),
    ) -> "PromptSource":
        """The validation sources, rendered as the training prompts are; generated kinds never overlap training.

        Raises PromptError, also when fewer rows are left than one validation takes.
        """
        held_out = cls(data, tokenizer, sources=validation.sources, held_out=True, tools=tools)
        if held_out.num_rows < validation.num_prompts:
            raise PromptError(
                f"{held_out.num_rows} held-out prompts are left ({held_out.num_filtered} were filtered out) but "
                f"validation.num_prompts is {validation.num_prompts}; add rows, lower num_prompts, or raise "
                f"data.max_prompt_length ({data.max_prompt_length})"
            )
        return held_out

    @property
    def rendered(self) -> list[tuple[SourceConfig, list[SourceRow], list[tuple[int, ...]]]]:
        """Each source with its rows and their token ids, as they are left after filtering or cutting."""
        return [(rendered.source, rendered.rows, rendered.ids) for rendered in self._sources]

    @property
    def group_sizes(self) -> list[int | None]:
        """What each source asks for."""
        return [rendered.source.group_size for rendered in self._sources]

    def rows(self, epoch: int, start: int, count: int, *, skip: Collection[str] = ()) -> PromptSlice:
        """The next `count` prompts from a position on; an epoch's end runs over into the next epoch.

        Args:
            epoch: which pass; 0 is the first.
            start: position in it; beyond `num_rows` it counts on into the next epochs.
            count: prompts wanted.
            skip: keys of prompts to leave out (curriculum); the position then advances further than `count`.

        Raises:
            PromptError: for a negative position, or when everything is skipped.
        """
        if epoch < 0 or start < 0:
            raise PromptError(
                f"position (epoch {epoch}, start {start}) does not exist; epochs and positions count from 0"
            )
        epoch, start = epoch + start // self.num_rows, start % self.num_rows
        prompts: list[Prompt] = []
        since_last = 0
        while len(prompts) < count:
            if start == self.num_rows:
                epoch, start = epoch + 1, 0
            prompt = self._at(epoch, start)
            start, since_last = start + 1, since_last + 1
            if prompt.key not in skip:
                prompts.append(prompt)
                since_last = 0
            elif since_last >= 2 * self.num_rows:
                raise PromptError(
                    f"all {self.num_rows} prompts are to be skipped; the curriculum has nothing left to train on"
                )
        if start == self.num_rows:
            epoch, start = epoch + 1, 0
        return PromptSlice(prompts=prompts, epoch=epoch, start=start)

    def position_state(self, epoch: int, start: int) -> dict[str, Any]:
        """What a checkpoint keeps of the data position."""
        return {"epoch": epoch, "start": start, "identity": self.identity}

    def resume_position(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """(epoch, start) to go on from: the saved one for the same data, the beginning for other data."""
        if state["identity"] != self.identity:
            logger.warning(
                "the prompts are not those of the checkpoint; the data starts at its beginning instead of %s",
                dict(state),
            )
            return 0, 0
        return int(state["epoch"]), int(state["start"])

    def _at(self, epoch: int, position: int) -> Prompt:
        if self._order.epoch != epoch:
            self._order = self._epoch_order(epoch)
        rendered = self._sources[int(self._order.source_numbers[position])]
        number = int(self._order.row_numbers[position])
        row = rendered.rows[number]
        return Prompt(
            ordinal=epoch * self.num_rows + position,
            source=rendered.source.name,
            index=row.index,
            text=row.prompt if isinstance(row.prompt, str) else json.dumps(row.prompt, ensure_ascii=False),
            answer=row.answer,
            extra=row.extra,
            ids=rendered.ids[number],
            group_size=rendered.source.group_size,
        )

    def _epoch_order(self, epoch: int) -> _EpochOrder:
        """Each source goes through shuffled passes of its own rows, at its own pace; the pattern merges them."""
        row_numbers = np.empty(self.num_rows, np.int64)
        for number, rendered in enumerate(self._sources):
            taken, size = int(self._counts[number]), len(rendered.rows)
            first = epoch * taken
            passes = range(first // size, (first + taken - 1) // size + 1) if taken else range(0)
            shuffled = [self._permutation(rendered.source.name, number_of_pass, size) for number_of_pass in passes]
            if shuffled:
                offset = first % size
                row_numbers[self._pattern == number] = np.concatenate(shuffled)[offset : offset + taken]
        return _EpochOrder(epoch=epoch, source_numbers=self._pattern, row_numbers=row_numbers)

    def _permutation(self, name: str, number_of_pass: int, size: int) -> np.ndarray:
        seed = stream_seed(self._data.seed, f"shuffle {name}", number_of_pass)
        return np.random.Generator(np.random.PCG64(seed)).permutation(size)

    def _check_shares(self) -> None:
        idle = [one.source.name for one, count in zip(self._sources, self._counts, strict=True) if not count]
        if idle:
            raise PromptError(
                f"sources {idle} have weights so small that none of the {self.num_rows} prompts of an epoch is theirs; "
                "raise data.sources[].weight, or remove them"
            )

    def _identity(self) -> str:
        digest = hashlib.sha256()
        for rendered in self._sources:
            digest.update(json.dumps([rendered.source.name, len(rendered.rows)]).encode())
            for row in rendered.rows:
                digest.update(json.dumps([row.prompt, row.answer]).encode())
        return digest.hexdigest()[:16]

    # Rendering -----------------------------------------------------------------------------------------------------

    def _render(self, source: SourceConfig, rows: list[SourceRow]) -> _Rendered:
        """Token ids of every row, cut or filtered in this one place, so that every reader has the same ids."""
        all_ids = self._encode(source, rows)
        blank = [row.index for row, ids in zip(rows, all_ids, strict=True) if not ids]
        if blank:
            raise PromptError(
                f"source {source.name!r}: rows {blank[:20]} ({len(blank)} in all) render to no token at all; remove "
                "them"
            )
        limit, policy = self._data.max_prompt_length, self._data.overlong_prompts
        long = [(row.index, len(ids)) for row, ids in zip(rows, all_ids, strict=True) if len(ids) > limit]
        if long and policy == "error":
            told = ", ".join(f"row {index}: {length} tokens" for index, length in long[:20])
            raise PromptError(
                f"source {source.name!r}: {len(long)} prompts are longer than data.max_prompt_length = {limit} "
                f"({told}); raise it to {max(length for _, length in long)}, or set data.overlong_prompts to filter or "
                "truncate_left"
            )
        if policy == "filter":
            kept = [(row, ids) for row, ids in zip(rows, all_ids, strict=True) if len(ids) <= limit]
        else:
            cut = slice(-limit, None) if policy == "truncate_left" else slice(None, limit)
            kept = [(row, ids[cut]) for row, ids in zip(rows, all_ids, strict=True)]
        if not kept:
            raise PromptError(
                f"source {source.name!r}: all {len(rows)} prompts are longer than data.max_prompt_length = {limit} "
                "tokens; raise it"
            )
        if len(kept) < len(rows):
            logger.info(
                "source %s: %d of %d prompts filtered out as longer than %d tokens",
                source.name,
                len(long),
                len(rows),
                limit,
            )
        return _Rendered(
            source=source,
            rows=[row for row, _ in kept],
            ids=[tuple(ids) for _, ids in kept],
            num_filtered=len(rows) - len(kept),
        )

    def _encode(self, source: SourceConfig, rows: list[SourceRow]) -> list[list[int]]:
        if not self._data.chat_template:
            chats = [row.index for row in rows if not isinstance(row.prompt, str)]
            if chats or self._data.system_prompt is not None:
                raise PromptError(
                    f"source {source.name!r} has chat messages (rows {chats[:5]}) or data.system_prompt is set, but "
                    "data.chat_template "
                    "is false; set it to true"
                )
            return self._tokenizer([str(row.prompt) for row in rows])["input_ids"]
        if self._tokenizer.chat_template is None:
            raise PromptError(
                "data.chat_template is true but the tokenizer has no chat template; set it to false or use another "
                "tokenizer"
            )
        texts = [self._through_template(source, row) for row in rows]
        # The template writes the special tokens itself.
        return self._tokenizer(texts, add_special_tokens=False)["input_ids"]

    def _through_template(self, source: SourceConfig, row: SourceRow) -> Any:
        messages = self._messages(row)
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=cast("Any", self._tools), tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise PromptError(
                f"source {source.name!r}: the chat template refuses row {row.index}, whose messages are by "
                f"{[message['role'] for message in messages]}: {type(error).__name__}: {error}; change the row, "
                "data.system_prompt, or the tokenizer's template"
            ) from error

    def _messages(self, row: SourceRow) -> list[dict[str, str]]:
        messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else list(row.prompt)
        system = self._data.system_prompt
        return messages if system is None else [{"role": "system", "content": system}, *messages]


def _mix(weights: Sequence[float], total: int) -> tuple[np.ndarray, np.ndarray]:
    """Which source stands at each of `total` positions, and how often each does: the one furthest behind its share.

    >>> _mix([2.0, 1.0], 6)[0].tolist()
    [0, 1, 0, 0, 1, 0]
    """
    shares = np.asarray(weights) / sum(weights)
    if len(weights) == 1:
        return np.zeros(total, np.int64), np.asarray([total])
    taken = np.zeros(len(weights))
    pattern = np.empty(total, np.int64)
    for position in range(total):
        number = int(np.argmax(shares * (position + 1) - taken))
        pattern[position] = number
        taken[number] += 1
    return pattern, taken.astype(np.int64)
