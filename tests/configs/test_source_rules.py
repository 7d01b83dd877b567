"""Settings of graders, services, texts and folders that nothing would read, or that would fail for each response."""

from pathlib import Path

import pytest

from configs.data import SourceConfig
from configs.load import load_config
from configs.model import ModelConfig
from tests.configs.test_rules import problems, the_problem


def grader(settings: str) -> str:
    return f"reward.graders=[{{name: g, {settings}}}]"


@pytest.mark.parametrize("name", ["exact", "Exact_answer", "my_project.rewards:score", ""])
def test_a_rule_that_is_none_is_refused_with_those_there_are(name: str):
    said = the_problem("quickstart", grader(f"function: '{name}'"))
    assert f"names rule {name!r}; the rules are ['environment_score', 'exact_answer'," in said
    assert "a function of yours has kind python" in said


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ("function: exact_answer, url: 'http://h'", "url"),
        ("function: exact_answer, model: {path: m}", "model"),
        ("kind: http, url: 'http://h', function: exact_answer", "function"),
        ("kind: sandbox, function: exact_answer", "function"),
        ("kind: python, function: 'a:b', judge: {base_url: 'http://h'}", "judge"),
    ],
)
def test_a_part_that_a_kind_of_grader_does_not_read_is_refused(settings: str, part: str):
    assert f"has {part}, which nothing reads" in the_problem("quickstart", grader(settings))


KINDS = {
    "rule": "function: exact_answer",
    "python": "kind: python, function: 'a:b'",
    "http": "kind: http, url: 'http://h'",
    "judge": "kind: judge, judge: {base_url: 'http://h'}",
    "sandbox": "kind: sandbox",
    "model": "kind: model, model: {path: m}",
}


@pytest.mark.parametrize(
    ("setting", "readers"),
    [
        ("is_group_wise: true", {"python", "http"}),
        ("options: {low: 0}", {"rule", "python", "http", "judge", "sandbox"}),
        ("timeout_seconds: 5.0", {"rule", "python", "http", "judge", "sandbox"}),
        ("sandbox: unsafe", {"sandbox"}),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_setting_that_a_kind_of_grader_does_not_read_is_refused(kind: str, setting: str, readers: set[str]):
    found = problems("quickstart", grader(f"{KINDS[kind]}, {setting}"))
    assert (found == []) == (kind in readers), found
    name = setting.partition(":")[0]
    assert kind in readers or f"'g' is of kind {kind} and has {name} " in found[0]


def test_a_judge_of_groups_is_told_who_sees_them():
    said = the_problem("quickstart", grader(f"{KINDS['judge']}, is_group_wise: true"))
    assert said.endswith("has is_group_wise true, which python and http alone read; remove it, or correct kind")


def test_graders_that_all_weigh_nothing_are_refused_for_the_source_that_they_score():
    said = the_problem("quickstart", grader("function: exact_answer, weight: 0"))
    assert said.startswith("reward.graders.0.weight is 0.0; no grader of source 'sorting' has another weight")


@pytest.mark.parametrize("weight", ["0.1", "-1"])
def test_a_grader_of_no_weight_may_stand_beside_one_that_counts(weight: str):
    of_none, counts = (
        f"{{name: {name}, function: exact_answer, weight: {one}}}" for name, one in (("a", 0), ("b", weight))
    )
    assert problems("quickstart", f"reward.graders=[{of_none}, {counts}]") == []


@pytest.mark.parametrize("algorithm", ["distillation", "grpo"])
def test_a_student_that_its_teacher_alone_rewards_needs_no_weight(algorithm: str):
    settings = [grader("function: exact_answer, weight: 0"), f"algorithm.name={algorithm}"]
    assert not any("weight" in problem for problem in problems("quickstart-distillation", *settings))


NO_ADDRESS = ["nope", "ftp://h/x", "http://", "http:///x", "h:8000", "//h", " http://h", "http://h h/x", "http://h:x/",
              "http://h:99999/", "http://[::1/x", ""]  # fmt: skip


@pytest.mark.parametrize("address", NO_ADDRESS)
@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("reward.graders.0.url", grader("kind: http, url: 'ADDRESS'")),
        ("reward.graders.0.judge.base_url", grader("kind: judge, judge: {base_url: 'ADDRESS'}")),
        ("prefect.api_url", "prefect.api_url='ADDRESS'"),
    ],
)
def test_what_is_no_address_of_a_service_is_refused(path: str, change: str, address: str):
    said = the_problem("quickstart", change.replace("ADDRESS", address))
    assert said.startswith(f"{path} is {address!r}; the address of a service is http://")


@pytest.mark.parametrize("address", ["foo", "foo:", ":6379", "http://h:6379", "h:0", "h:65536", "h:x", "a b:6379", ""])
def test_what_is_no_host_and_port_is_refused_as_the_address_of_a_cluster(address: str):
    said = the_problem("quickstart", f"ray.address='{address}'")
    assert said.startswith(f"ray.address is {address!r}; a Ray cluster is a host and a port below 65536")


@pytest.mark.parametrize("address", ["10.0.0.1:6379", "head:1", "head.example:65535", "[::1]:6379"])
def test_a_host_and_a_port_are_taken_as_the_address_of_a_cluster(address: str):
    assert problems("quickstart", f"ray.address='{address}'") == []


@pytest.mark.parametrize("address", ["http://h", "https://h/v1", "http://127.0.0.1:8000/x?y=1", "http://[::1]:8000/"])
def test_an_address_of_a_service_is_taken(address: str):
    assert problems("quickstart", grader(f"kind: http, url: '{address}'")) == []


def test_a_judge_that_never_sees_the_response_is_refused():
    judge = "{base_url: 'http://h', prompt: 'Is {prompt} right?'}"
    assert "the judge never sees what it scores" in the_problem("quickstart", grader(f"kind: judge, judge: {judge}"))


@pytest.mark.parametrize("query", ["api_key=sk-1", "x=1&HF_TOKEN=t", "password="])
def test_a_secret_in_the_query_of_an_address_is_refused_and_not_shown(query: str):
    said = the_problem("quickstart", grader(f"kind: http, url: 'http://h/?{query}sk-1'"))
    assert said.startswith("reward.graders.0.url is '(hidden)'; its query holds ")
    assert "sk-1" not in said


def test_a_judge_has_one_key():
    judge = "{base_url: 'http://h', api_key_env: A, api_key_block: b}"
    assert "both name a key" in the_problem("quickstart", grader(f"kind: judge, judge: {judge}"))


def test_a_sink_that_is_none_is_refused_with_those_there_are():
    said = the_problem("quickstart", "telemetry.sinks=[tensorbord]")
    assert "it must be one of tensorboard, wandb, mlflow; did you mean tensorboard?" in said


@pytest.mark.parametrize("turn", ["{prompt", "{question}", "{}", "{0}", "{prompt.text}", '{"name": "add"}'])
def test_a_turn_that_cannot_be_filled_in_is_refused(turn: str):
    said = the_problem("quickstart", f"sft.turns=['{turn}']")
    assert "{prompt} and {answer} are filled in, nothing else" in said


def test_a_brace_of_a_turn_is_written_twice():
    config = load_config("quickstart", ["sft.turns=['{{\"x\": \"{prompt}\"}}', '{answer}']"])
    assert config.sft is not None
    assert config.sft.turns[0].format(prompt="1", answer="2") == '{"x": "1"}'


@pytest.mark.parametrize(("warmup", "does_fit"), [(4, True), (5, False), (10, False)])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_rate_decays_after_its_warm_up(schedule: str, warmup: int, does_fit: bool):
    optimizer = f"{{lr: 0.1, schedule: {schedule}, total_steps: 5, warmup_steps: {warmup}}}"
    found = problems("quickstart", f"actor.optimizer={optimizer}")
    assert (found == []) == does_fit, found


def test_a_system_prompt_has_a_place_in_a_chat_template_alone():
    assert the_problem("quickstart", "data.system_prompt='be brief'").startswith("data.system_prompt is 'be brief'")


@pytest.mark.parametrize(
    "text", ["${HOME}/runs", "/tmp/${USER}/runs", "$HOME/runs", "$HOME", " ${HOME} ", "runs-${SLURM_JOB_ID}"]
)
def test_a_variable_inside_a_path_is_refused_like_one_alone(text: str):
    assert "nothing is filled in from the environment" in the_problem("quickstart", f"run_dir='{text}'")


@pytest.mark.parametrize("text", ["it costs ${price} a piece", "$5", "a$b", "$x$", "${}", "$(pwd)", "{HOME}"])
def test_a_dollar_that_names_no_variable_is_text(text: str):
    assert problems("quickstart", f"run_dir='{text}'") == []


def test_a_tilde_is_the_home_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config("quickstart", ["run_dir=~/runs", "code.import_paths=['~/mine', there]"])
    assert config.run_dir == f"{tmp_path}/runs"
    assert config.code.import_paths == (f"{tmp_path}/mine", "there")


def test_a_tilde_in_the_path_of_a_model_its_tokenizer_or_a_source_is_the_home_of_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("HOME", str(tmp_path))
    model = ModelConfig(path="~/critic", tokenizer_path="~/tokenizer")
    assert (model.path, model.tokenizer_path) == (f"{tmp_path}/critic", f"{tmp_path}/tokenizer")
    assert SourceConfig(name="mine", kind="json", path="~/rows.jsonl").path == f"{tmp_path}/rows.jsonl"
    assert ModelConfig(path="org/model~1").path == "org/model~1"


def test_a_folder_without_a_name_is_refused():
    assert the_problem("quickstart", "run_dir=''").startswith("run_dir is ''")


@pytest.mark.parametrize(
    "key", ["OPENAI_KEY", "KEY", "TOKEN", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWD", "SSH_PASSPHRASE", "api_key"]
)
def test_a_variable_that_is_named_like_a_secret_is_refused_and_not_shown(key: str):
    said = the_problem("quickstart", f"roles.actor.env.{key}=sk-12345")
    assert said.startswith(f"roles.actor.env.{key} is (hidden)")
    assert "sk-12345" not in said


@pytest.mark.parametrize("key", ["NCCL_DEBUG", "KEYBOARD", "MAX_TOKENS", "TOKENIZERS_PARALLELISM", "MONKEY"])
def test_a_variable_that_is_named_like_anything_else_is_taken(key: str):
    assert problems("quickstart", f"roles.actor.env.{key}=x") == []


@pytest.mark.parametrize("key", ["openai_key", "api-key", "hf_token", "db_passwd", "client_secret"])
def test_a_secret_under_an_unknown_key_is_not_shown(key: str):
    assert "sk-12345" not in the_problem("quickstart", f"data.{key}=sk-12345")


@pytest.mark.parametrize(("top_k", "does_fit"), [(127, True), (128, False), (1000, False)])
def test_the_likeliest_tokens_of_a_teacher_leave_a_rest(top_k: int, does_fit: bool):
    found = problems("quickstart-distillation", f"distillation.top_k={top_k}")
    assert (found == []) == does_fit
    assert does_fit or found[0].startswith(f"distillation.top_k is {top_k}; model.shape.vocab_size is 128")


@pytest.mark.parametrize("size", [2, 4])
def test_a_teacher_of_more_ranks_than_its_role_has_workers_is_refused_by_its_key(size: int):
    found = problems("quickstart-distillation", f"roles.teacher.tensor_parallel={size}")
    assert found[0].startswith("roles.teacher.workers is 1; tensor_parallel x sequence_parallel is")


def test_a_template_that_shows_no_result_is_refused():
    said = the_problem("quickstart-tools", "rollout.tools.result_template=done")
    assert "the model never sees what a tool answers" in said


def test_options_of_no_environment_are_refused():
    assert "environment is not set" in the_problem("quickstart-tools", "rollout.tools.environment_options={a: 1}")


def test_a_model_that_is_made_here_has_no_file_of_weights():
    assert "gguf_file is 'm.gguf' beside build" in the_problem("quickstart", "model.gguf_file=m.gguf")


def test_a_long_response_is_not_punished_by_a_grader_and_by_the_algorithm():
    changes = [
        "reward.graders=[{name: right, function: exact_answer}, {name: short, function: overlong_penalty}]",
        "algorithm.overlong={max_length: 8, buffer: 5}",
    ]
    assert the_problem("quickstart", *changes) == (
        "algorithm.overlong is 'given'; grader 'short' is an overlong_penalty, so that long responses would be "
        "punished twice; remove one of the two"
    )
    assert problems("quickstart", changes[0]) == []
    assert problems("quickstart", changes[1]) == []


def test_a_warm_up_on_a_source_without_a_column_of_answers_is_refused():
    mine = "data.sources=[{name: s, kind: json, path: rows.jsonl, answer_column: null}]"
    said = the_problem("quickstart", mine)
    assert said.startswith("data.sources.0.answer_column is null; the 36 steps of sft are learnt from the answers")
    for fit in ("sft=null", "sft.steps=0", "sft.turns=['{prompt}']", "sft.objective=reward_model"):
        assert problems("quickstart", mine, fit) == []
    assert problems("quickstart", "data.sources=[{name: s, kind: sorting, size: 600, answer_column: null}]") == []
