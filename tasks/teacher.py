"""The teacher step: every row is scored by the teacher of its data source, all teachers at the same time."""

from dataclasses import replace

from resources.store import BatchHandle
from resources.teachers import duty_of, route
from resources.telemetry.spans import RankSpan
from tasks.host import host
from tasks.replies import Replies, send
from tasks.stamp import Stamp
from tasks.step import StepResult, step

SCORED_COLUMNS = ("input_ids", "response_mask")
TEACHER_COLUMNS = ("teacher_log_probs", "teacher_top_k_ids", "teacher_top_k_log_probs")


@step(role="teacher", reads=(*SCORED_COLUMNS, "record"), writes=TEACHER_COLUMNS)
def teacher(at: Stamp, batch: BatchHandle) -> StepResult:
    """Add `teacher_log_probs`, and with `forward_kl_top_k` the teacher's likeliest tokens.

    Facts: `rows`, the number of rows of each teacher.
    """
    config = host().config
    temperature, distillation = config.rollout.sampling.temperature, config.distillation
    top_k = distillation.top_k if distillation.objective == "forward_kl_top_k" else None
    routed = route(host().read(batch, columns=("record",)).load(("record",)), config.teachers)
    rows = host().read(batch, columns=SCORED_COLUMNS)
    duties = {teacher.name: duty_of(teacher) for teacher in config.teachers}
    calls = [
        send(duties[name], "score", rows.select(ids), temperature=temperature, top_k=top_k, is_bulk=True)
        for name, ids in routed.items()
    ]
    answers = [call.wait() for call in calls]
    counted = {name: len(ids) for name, ids in routed.items()}
    return _together(answers).keep(at.batch_id, rows=counted)


def _together(answers: list[Replies]) -> Replies:
    """One set of replies of all teachers; ranks are numbered on, so that spans tell them apart."""
    spans: list[RankSpan] = []
    for answer in answers:
        spans += [replace(span, rank=len(spans) + index) for index, span in enumerate(answer.spans)]
    return Replies(
        statuses=[status for answer in answers for status in answer.statuses],
        data=[data for answer in answers for data in answer.data],
        spans=tuple(spans),
    )
