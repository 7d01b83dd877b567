"""The plain engine: exact log-probs, per-row seeds, cohorts, aborts and weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM

from resources.engines.base import FinishReason, GenerationRequest, Sampling, WeightMismatchError
from resources.engines.huggingface import HuggingFaceEngine, processed_log_probs
from resources.seeding import row_seed
from tests.resources.engines.updates import update_weights

from .conftest import STOP, build_tiny, exact_log_probs


@pytest.fixture(scope="module")
def engine(tiny_folder) -> HuggingFaceEngine:
    return HuggingFaceEngine(str(tiny_folder), dtype="float32", slots=6)


def requests_for(count: int, max_tokens: int = 6) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            row_id=row, prompt_ids=(1, *range(3, 5 + row % 3)), seed=row_seed(0, 0, row), max_tokens=max_tokens
        )
        for row in range(count)
    ]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probs_are_those_of_a_whole_forward(engine, temperature):
    requests = requests_for(9)
    outputs = engine.generate(requests, Sampling(temperature=temperature, stop_token_ids=(STOP,)))
    for request, output in zip(requests, outputs, strict=True):
        ids = [*request.prompt_ids, *output.token_ids]
        exact = exact_log_probs(build_tiny(0), ids, temperature)[len(request.prompt_ids) :]
        torch.testing.assert_close(torch.tensor(output.log_probs), exact, atol=1e-5, rtol=0)


def test_a_row_draws_the_same_tokens_alone_as_among_others(engine):
    together = engine.generate(requests_for(9), Sampling())
    alone = engine.generate(requests_for(9)[4:5], Sampling())
    assert alone[0].token_ids == together[4].token_ids


def test_siblings_differ(engine):
    rows = [GenerationRequest(row_id=k, prompt_ids=(1, 7), seed=row_seed(0, 0, k), max_tokens=6) for k in range(4)]
    assert len({output.token_ids for output in engine.generate(rows, Sampling())}) == 4


def test_sampled_frequencies_follow_the_distribution(engine):
    rows = [GenerationRequest(row_id=k, prompt_ids=(1, 7), seed=row_seed(3, 0, k), max_tokens=1) for k in range(600)]
    sampling = Sampling(top_k=2)
    tokens = [output.token_ids[0] for output in engine.generate(rows, sampling)]
    with torch.no_grad():
        exact = processed_log_probs(build_tiny(0)(torch.tensor([[1, 7]])).logits[0, -1], sampling).exp()
    top = int(exact.argmax())
    # Three standard deviations of 600 draws.
    assert tokens.count(top) / 600 == pytest.approx(float(exact[top]), abs=3 * (0.25 / 600) ** 0.5)


def test_top_p_keeps_the_smallest_set_that_reaches_its_mass():
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    assert processed_log_probs(logits, Sampling(top_p=0.5)).exp().tolist() == [1.0, 0.0, 0.0]
    kept = processed_log_probs(logits, Sampling(top_p=0.6)).exp()
    torch.testing.assert_close(kept, torch.tensor([0.625, 0.375, 0.0]))


def test_a_stop_token_ends_a_row_and_stays(engine):
    outputs = engine.generate(requests_for(9, max_tokens=20), Sampling(stop_token_ids=tuple(range(2, 50))))
    stopped = [output for output in outputs if output.finish_reason is FinishReason.STOP]
    assert stopped
    assert all(2 <= output.token_ids[-1] < 50 for output in stopped)


def test_aborted_rows_keep_their_tokens_and_the_rest_goes_on(engine):
    whole = engine.generate(requests_for(3), Sampling())
    for request in requests_for(3):
        engine.add_request(request, Sampling())
    for _ in range(2):
        engine.step()
    [aborted] = engine.abort([1])
    assert aborted.token_ids == whole[1].token_ids[:2]
    rest = []
    while engine.has_unfinished():
        rest += engine.step()
    assert {o.row_id: o.token_ids for o in rest} == {o.row_id: o.token_ids for o in whole if o.row_id != 1}


def test_a_model_that_names_no_longest_sequence_is_sampled_and_one_that_does_is_held_to_it(engine, tmp_path):
    torch.manual_seed(0)
    BloomForCausalLM(BloomConfig(vocab_size=96, hidden_size=16, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    rows = requests_for(3, max_tokens=300)
    for request, output in zip(
        rows, HuggingFaceEngine(str(tmp_path), dtype="float32", slots=6).generate(rows, Sampling()), strict=True
    ):
        ids = [*request.prompt_ids, *output.token_ids]
        exact = exact_log_probs(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), ids, 1.0)
        assert len(output.token_ids) == 300
        torch.testing.assert_close(torch.tensor(output.log_probs), exact[len(request.prompt_ids) :], atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match=r"row 0 needs 3 \+ 300 tokens; the engine was started for 256"):
        engine.generate(rows, Sampling())


def test_new_weights_are_checked_and_change_the_score(engine):
    new = build_tiny(1)
    names = [name for name, _ in new.named_parameters()]
    report = update_weights(engine, list(new.named_parameters()), 3, names)
    assert (report.version, engine.policy_version) == (3, 3)
    torch.testing.assert_close(
        torch.tensor(engine.score([1, 5, 9])), exact_log_probs(new, [1, 5, 9]), atol=1e-5, rtol=0
    )
    with pytest.raises(WeightMismatchError, match="weights are missing"):
        update_weights(engine, list(new.named_parameters())[:2], 4, names)
    with pytest.raises(RuntimeError, match="no valid weights"):
        engine.generate(requests_for(1), Sampling())
    update_weights(engine, list(build_tiny(0).named_parameters()), 0, names)
