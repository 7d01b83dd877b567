"""Teachers: which of them scores which rows, and whether it reads the student's tokens as the student does.

Each teacher has a worker group of its own on a part of the teacher role's bundles (configs/layout.py cuts them), named
`teacher.NAME`. Rows go to the teacher of their data source.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase

from configs.problems import UNSAID, ConfigError, Problem
from configs.run import RunConfig
from configs.training import TeacherConfig
from resources.rollout_rows import records_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TeacherError(ValueError):
    """A teacher that cannot teach this student: which, why, and what to do."""


def duty_of(teacher: TeacherConfig) -> str:
    """Name of the teacher's worker group."""
    return f"teacher.{teacher.name}"


def route(rows: TensorDictBase, teachers: Sequence[TeacherConfig]) -> dict[str, list[int]]:
    """Teacher's name -> ids of the rows it scores, by the data source in each row's `record`.

    Raises TeacherError for a row that no teacher, or more than one, is there for.
    """
    routed: dict[str, list[int]] = {teacher.name: [] for teacher in teachers}
    for row_id, record in zip(rows["row_ids"].tolist(), records_of(rows), strict=True):
        source = record["source"]
        found = [teacher.name for teacher in teachers if not teacher.sources or source in teacher.sources]
        if len(found) != 1:
            raise TeacherError(
                f"row {row_id} comes from source {source!r}, for which the teachers are {found}; every row has exactly "
                "one: name each source in one teacher's sources"
            )
        routed[found[0]].append(row_id)
    return {name: ids for name, ids in routed.items() if ids}


def check_teachers(config: RunConfig) -> None:
    """Compare every teacher's tokenizer with the student's, before anything is started. Raises ConfigError."""
    from resources.models.causal_lm import ModelError, load_tokenizer

    student = load_tokenizer(config.model)
    problems: list[Problem] = []
    for index, teacher in enumerate(config.teachers):
        try:
            match_tokens(student, load_tokenizer(teacher.model), teacher.name)
        except (TeacherError, ModelError) as error:
            problems.append(Problem(f"teachers.{index}", UNSAID, str(error)))
    if problems:
        raise ConfigError("teachers", problems)


def match_tokens(student: "PreTrainedTokenizerBase", teacher: "PreTrainedTokenizerBase", name: str) -> list[int] | None:
    """None when both number the same tokens alike; else the teacher's id of each of the student's ids.

    Exact or refused: the same text must be cut into the same tokens, or a token's log-prob under the teacher would be
    that of another event. Only the numbers of tokens may differ.

    Raises:
        TeacherError: naming the first difference.
    """
    own, theirs = student.get_vocab(), teacher.get_vocab()
    missing = sorted(set(own) - set(theirs), key=own.__getitem__)
    extra = sorted(set(theirs) - set(own), key=theirs.__getitem__)
    if missing or extra:
        raise TeacherError(
            f"teacher {name!r} has another tokenizer: {len(missing)} of the student's {len(own)} tokens are not in it, "
            f"for example {missing[:3]}, and {len(extra)} of its own are not the student's, for example {extra[:3]}. "
            "Log-probs are compared token by token; take a teacher and a student of one model family"
        )
    difference = _first_difference(_rules_of(student), _rules_of(teacher))
    if difference is not None:
        raise TeacherError(
            f"teacher {name!r} has the student's tokens but cuts text into them otherwise ({difference} differs), so "
            "the student's samples would be unlikely to it for their spelling alone; use the student's tokenizer"
        )
    if student.eos_token != teacher.eos_token:
        raise TeacherError(
            f"teacher {name!r} ends with {teacher.eos_token!r} and the student with {student.eos_token!r}; the "
            "teacher would never want a response to end. Set both to the same end-of-sequence token"
        )
    if own == theirs:
        return None
    table = [0] * (max(own.values()) + 1)
    for token, number in own.items():
        table[number] = theirs[token]
    return table


def _rules_of(tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """What decides how text is cut, without the numbers of tokens. Empty for a tokenizer without a fast form."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {"class": type(tokenizer).__name__}
    parts = json.loads(backend.to_str())
    model = {key: value for key, value in parts["model"].items() if key != "vocab"}
    return {"normalizer": parts["normalizer"], "pre_tokenizer": parts["pre_tokenizer"], **model}


def _first_difference(left: dict[str, Any], right: dict[str, Any]) -> str | None:
    return next((key for key in sorted({*left, *right}) if left.get(key) != right.get(key)), None)
