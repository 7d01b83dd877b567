"""The scripted engine answers as told, in the time a real one would take, and fails when told."""

import pytest

from configs.rollout import RolloutConfig, ScriptedConfig
from resources.engines.base import FinishReason, GenerationRequest, Sampling
from resources.engines.scripted import ScriptedEngine
from resources.seeding import row_seed

SAMPLING = Sampling(stop_token_ids=(2,))


def encode(text: str) -> list[int]:
    return [10 + int(digit) for digit in text]


def build(responses: dict, *, slots: int = 8, seconds_per_token: float = 0.0) -> ScriptedEngine:
    script = ScriptedConfig(responses=responses, seconds_per_token=seconds_per_token)
    rollout = RolloutConfig(engine="scripted", scripted=script, max_running_sequences=slots)
    return ScriptedEngine(rollout, vocab_size=40, encode=encode)


def requests_for(count: int, *, max_tokens: int = 20, answer: str = "12357") -> list[GenerationRequest]:
    return [
        GenerationRequest(
            row_id=row,
            prompt_ids=(5,),
            seed=row_seed(0, 0, row),
            max_tokens=max_tokens,
            answer=answer,
            prompt_index=row,
        )
        for row in range(count)
    ]


def test_fixed_responses_follow_the_prompt_index():
    outputs = build({"mode": "fixed", "texts": {"1": "9", "*": "34"}}).generate(requests_for(2), SAMPLING)
    assert [output.token_ids for output in outputs] == [(13, 14, 2), (19, 2)]
    assert {output.finish_reason for output in outputs} == {FinishReason.STOP}


def test_answers_are_right_as_often_as_asked():
    outputs = build({"mode": "answer", "accuracy": 0.8}).generate(requests_for(500), SAMPLING)
    right = sum(output.token_ids == (11, 12, 13, 15, 17, 2) for output in outputs) / 500
    assert right == pytest.approx(0.8, abs=0.06)


@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_accuracy_zero_and_one_are_exact(accuracy):
    outputs = build({"mode": "answer", "accuracy": accuracy}).generate(requests_for(64, answer="7"), SAMPLING)
    assert sum(output.token_ids == (17, 2) for output in outputs) == 64 * accuracy


def test_random_responses_depend_on_the_seed_alone():
    engine = build({"mode": "random", "min_length": 2, "max_length": 9})
    first, second = engine.generate(requests_for(20), SAMPLING), engine.generate(requests_for(20)[7:8], SAMPLING)
    assert second[0].token_ids == first[7].token_ids
    assert second[0].log_probs == first[7].log_probs
    assert all(2 <= len(output.token_ids) <= 9 for output in first)
    assert all(log_prob <= 0 for output in first for log_prob in output.log_probs)


def test_a_response_cut_at_the_limit_says_so():
    [output] = build({"mode": "fixed", "texts": {"*": "123456"}}).generate(requests_for(1, max_tokens=3), SAMPLING)
    assert (output.token_ids, output.finish_reason) == ((11, 12, 13), FinishReason.LENGTH)


def test_rows_finish_in_the_order_of_their_lengths_and_slots():
    # Two slots: row 0 (1 token + stop) ends first, row 2 takes its slot, row 1 (6 + stop) ends last.
    engine = build({"mode": "fixed", "texts": {"0": "1", "1": "111111", "2": "1"}}, slots=2, seconds_per_token=0.02)
    told: list[int] = []
    engine.generate(requests_for(3), SAMPLING, on_finished=lambda outputs: told.extend(o.row_id for o in outputs))
    assert told == [0, 2, 1]
    assert engine.facts.span["slots"] == 2


def test_a_long_tail_has_a_few_long_rows():
    engine = build({"mode": "random", "lengths": "long_tail", "min_length": 4, "max_length": 200}, slots=512)
    lengths = sorted(len(output.token_ids) for output in engine.generate(requests_for(500, max_tokens=200), SAMPLING))
    assert lengths[250] < 40
    assert lengths[-1] > 160


def test_aborted_rows_are_cut():
    engine = build({"mode": "fixed", "texts": {"*": "111111"}}, seconds_per_token=10.0)
    engine.add_request(requests_for(1)[0], SAMPLING)
    [output] = engine.abort()
    assert (output.token_ids, output.finish_reason) == ((), FinishReason.ABORT)
    assert not engine.has_unfinished()


def test_a_planned_fault_is_met_once_when_it_has_a_marker(tmp_path):
    marker = str(tmp_path / "happened")
    fault = {"kind": "raise", "generation": 1, "after_rows": 1, "marker": marker}
    responses = {"mode": "fixed", "texts": {"*": "1"}, "faults": [fault]}
    with pytest.raises(RuntimeError, match="scripted fault in generation 1 after 4 rows"):
        build(responses).generate(requests_for(4), SAMPLING)
    assert len(build(responses).generate(requests_for(4), SAMPLING)) == 4


def test_a_slow_row_delays_the_last_row_alone():
    fault = {"kind": "slow_row", "generation": 1, "seconds": 0.05}
    engine = build({"mode": "fixed", "texts": {"*": "1"}, "faults": [fault]})
    told: list[list[int]] = []
    engine.generate(requests_for(3), SAMPLING, on_finished=lambda outputs: told.append([o.row_id for o in outputs]))
    assert told == [[0, 1], [2]]


def test_unknown_keys_of_a_script_are_refused():
    with pytest.raises(ValueError, match="accurracy"):
        build({"mode": "answer", "accurracy": 0.5})
