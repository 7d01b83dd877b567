"""The curriculum: solved prompts are not visited again, and a run that goes on later visits the same rows."""

from dataclasses import replace

import pytest

from resources.curriculum import decode_solved, encode_solved
from resources.prompt_sources import PromptError
from resources.run_directory import RunDirectory, read_lines
from resources.samples import read_samples_of, sample_files
from tasks.agenda import Agenda
from tasks.host import call_step, use_host
from tasks.rollout import data_position
from tasks.run_state import RunState
from tests.tasks.local_cast import SmallCast, small_config

MIXED = (
    "algorithm.name=rloo",
    "rollout.group_size=2",
    "data.curriculum=skip_solved",
    "data.sources=[{name: a, kind: sorting, size: 20, weight: 2.0, options: {num_digits: 3}},"
    " {name: b, kind: sorting, size: 20, options: {num_digits: 4}}]",
)


def visited(folder) -> list[tuple[str, int, int]]:
    rows = [row for path in sample_files(folder).values() for row in read_samples_of(path)]
    return [(row["source"], row["index"], row["row_id"]) for row in rows]


def test_a_mixed_run_that_resumes_visits_the_identical_rows(small_cast: SmallCast, tmp_path):
    whole = small_cast.run(small_config(*MIXED), fresh=["rollout"])
    whole.samples_folder = tmp_path / "whole"
    for _ in range(6):
        whole.iterate()

    first = small_cast.run(small_config(*MIXED), fresh=["rollout"])
    first.samples_folder = tmp_path / "parts"
    for _ in range(3):
        first.iterate()
    later = small_cast.run(small_config(*MIXED), fresh=["rollout"])
    later.samples_folder = first.samples_folder
    later.state = RunState.from_json(first.state.to_json())
    later.context.group("rollout").workers[0].engine.policy_version = later.state.policy_version
    for _ in range(3):
        later.iterate()
    assert visited(tmp_path / "parts") == visited(tmp_path / "whole")
    assert later.state.parts == whole.state.parts


def test_a_solved_prompt_is_not_visited_again(small_cast: SmallCast, tmp_path):
    run = small_cast.run(small_config(*MIXED), fresh=["rollout"])
    run.samples_folder = tmp_path
    solved: set[str] = set()
    for number in range(6):
        run.iterate()
        asked = {f"{row['source']}:{row['index']}" for row in read_samples_of(sample_files(tmp_path)[number])}
        assert not asked & solved
        solved = set(decode_solved(run.state.parts["curriculum"]))
    assert solved


def test_what_was_solved_of_other_data_is_not_left_out_of_the_new(small_cast: SmallCast, run_dir):
    run = small_cast.run(small_config(*MIXED), fresh=["rollout"])
    run.iterate()
    agenda = Agenda(run.config, RunDirectory.create(run_dir, "resumed"))
    agenda.state = replace(run.state, parts={"curriculum": encode_solved(["a:3"]), "reward": {"count": 4.0}})
    same = run.facts["rollout"]["next_position"]
    with use_host(run.context):
        agenda.take_position(call_step(data_position, agenda.stamp(), agenda.saved_position).facts)
        assert (agenda.solved, agenda.saved_position) == (encode_solved(["a:3"]), same)

    renamed = [option.replace("size: 20", "size: 19") for option in MIXED]
    other = small_cast.run(small_config(*renamed), fresh=["rollout"])
    with use_host(other.context):
        agenda.take_position(call_step(data_position, agenda.stamp(), agenda.saved_position).facts)
    assert agenda.solved == ""
    assert (agenda.state.epoch, agenda.state.start, agenda.state.parts) == (0, 0, {"reward": {"count": 4.0}})
    [event] = read_lines(agenda.directory.events)
    assert (event["kind"], event["before"]) == ("data-changed", same)


def test_a_task_that_is_solved_whole_ends_with_a_message(small_cast: SmallCast):
    config = small_config(*MIXED, script={"mode": "answer", "accuracy": 1.0})
    run = small_cast.run(config, fresh=["rollout"])
    while len(decode_solved(run.state.parts.get("curriculum", ""))) < 40:
        run.iterate()
    with pytest.raises(PromptError, match="the curriculum has nothing left to train on"):
        run.iterate()
