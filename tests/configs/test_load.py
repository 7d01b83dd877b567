"""Reading a config: presets, overrides, and what a person reads when something is wrong."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from configs.load import check_config, dump_config, load_config, preset_names
from configs.problems import ConfigError, Problem

ROOT = Path(__file__).parents[2]


def refusal(*overrides: str, source: str = "quickstart") -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return str(caught.value)


def test_an_override_reaches_a_nested_number():
    config = load_config("quickstart", ["actor.optimizer.lr=1e-4", "data.sources.0.size=700", "pools.main.nodes=[3]"])
    assert (config.actor.optimizer.lr, config.data.sources[0].size, config.pools["main"].nodes) == (1e-4, 700, (3,))


def test_an_override_opens_a_section_that_was_left_out():
    config = load_config("quickstart", ["algorithm.overlong.max_length=8", "algorithm.overlong.buffer=2"])
    assert config.algorithm.overlong is not None
    assert config.algorithm.overlong.factor == 1.0


def test_a_later_override_wins():
    assert load_config("quickstart", ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize("override", ["trainer..num_epochs=2", ".seed=1", "seed.=1", "=3", " seed=1"])
def test_an_override_with_an_empty_or_padded_segment_is_refused(override: str):
    assert "empty segment" in refusal(override)


@pytest.mark.parametrize(
    ("override", "path"),
    [("trainer.num_epoch=2", "trainer"), ("algorithm.num_epoch=2", "algorithm.num_epoch"), ("seeed=1", "seeed")],
)
def test_an_override_of_an_unknown_key_is_refused(override: str, path: str):
    assert f"{path} is " in refusal(override)
    assert "there is no such key" in refusal(override)


@pytest.mark.parametrize("override", ["seed", "seed=", "model.build.bits=3", "data.sources.4.size=1", "name=a: b: c"])
def test_a_malformed_override_is_refused(override: str):
    assert refusal(override).startswith("quickstart: 1 problem\n  --set is ")


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("algorithm.kl_coeff=0.1", "did you mean algorithm.kl.coef?"),
        ("learning_rate=0.1", "did you mean actor.optimizer.lr?"),
        ("data.lora_r=8", "did you mean model.lora.rank?"),
        ("algorithm.num-ppo-epochs=2", "did you mean algorithm.num_ppo_epochs?"),
        ("rollout.temperature=0.5", "did you mean rollout.sampling.temperature?"),
        ("pools.main.nodez=[1]", "did you mean pools.main.nodes?"),
        ("roles.actr.pool=main", "did you mean actor?"),
        ("algorithm.name=grppo", "did you mean grpo?"),
        ("model.lora={rank: 8, targets: [q_proj]}", "did you mean model.lora.target_modules?"),
        ("data.sources.0.sise=3", "did you mean data.sources.0.size?"),
    ],
)
def test_a_misspelt_key_gets_the_nearest_known_one(override: str, meant: str):
    assert meant in refusal(override)


@pytest.mark.parametrize(
    "override",
    [
        "actor.optimizer.max_grad_norm=true",
        "actor.optimizer.max_grad_norm='1.0'",
        "actor.optimizer.max_grad_norm=-1",
        "actor.optimizer.max_grad_norm=0",
        "actor.optimizer.max_grad_norm=.inf",
        "actor.optimizer.max_grad_norm=.nan",
        "rollout.group_size=4.0",
        "rollout.group_size='4'",
        "rollout.group_size=0",
        "rollout.group_size=true",
        "rollout.sampling.temperature=0",
        "rollout.sampling.stop_token_ids=[-1]",
        "algorithm.kl.target=0",
        "algorithm.kl.horizon=0",
        "algorithm.kl.horizon=-1",
        "checkpoint.keep=0",
        "pools.main.nodes=[0]",
        "pools.main.nodes=[-1]",
        "pools.main.nodes=[]",
        "iterations=null",
        "model.trust_remote_code=true",
        "name=Has Spaces",
        "rollout.kv_cache_bytes=12XB",
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused(override: str):
    path = override.partition("=")[0]
    assert path.rpartition(".")[0] in refusal(override)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("code.import_paths=/x", "code.import_paths is '/x'; it must be a list; write [/x]"),
        ("pools.main.nodes=3", "pools.main.nodes is 3; it must be a list; write [3]"),
        ("reward.graders=[]", "reward.graders is []; it must have at least 1 entries"),
    ],
)
def test_a_list_is_asked_for_in_the_words_of_the_file(override: str, said: str):
    assert said in refusal(override)


def test_all_mistakes_are_told_at_once():
    text = refusal("seed=1.5", "rollout.group_size=0", "algorithm.gama=1.0")
    assert text.startswith("quickstart: 3 problems\n")
    assert "seed is 1.5; it must be an integer" in text
    assert "rollout.group_size is 0; it must be greater than or equal to 1" in text
    assert "algorithm.gama is 1.0; there is no such key; did you mean algorithm.gamma?" in text


def test_an_unknown_preset_lists_the_presets():
    with pytest.raises(ConfigError, match="did you mean quickstart") as caught:
        load_config("quikstart")
    assert all(name in str(caught.value) for name in preset_names())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: 1\nseed: 2\n", "line 2, column 1: key 'seed' stands twice"),
        ("a: [1\n", "line"),
        ("- 1\n- 2\n", "no section"),
        ("", "no section"),
        ("? [1, 2]\n: 3\n", "a key must be plain text"),
        ("a: !!python/object/apply:os.system ['true']\n", "the value has a tag"),
        ("a: &x {b: *x}\n", "line 1, column 11: *x stands inside what &x names"),
        ("1: 2\n", "line 1, column 1: key 1 is no text"),
    ],
)
def test_a_broken_file_is_refused_with_its_place(tmp_path: Path, text: str, said: str):
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="broken") as caught:
        load_config(file)
    assert said in str(caught.value)


def test_a_file_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="no such file"):
        load_config("nowhere/run.yaml")


@pytest.mark.parametrize("source", ["a" * 300, "a" * 300 + ".yaml"])
def test_a_name_too_long_for_a_file_is_refused(source: str):
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        load_config(source)


def test_a_folder_is_refused_with_what_to_give_in_its_place(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"it is a folder; give a YAML file, say config\.yaml in it"):
        load_config(tmp_path)


def test_a_link_that_leads_nowhere_is_no_file(tmp_path: Path):
    (tmp_path / "run.yaml").symlink_to(tmp_path / "gone.yaml")
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "run.yaml")


@pytest.mark.parametrize("override", ["checkpoint=null", "checkpoint=3", "data.sources.0=sorting", "pools.main=[1]"])
def test_what_should_be_a_section_is_refused_with_the_keys_it_has(override: str):
    assert "it must be a section of keys; its keys are " in refusal(override)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(file)


def test_nothing_is_filled_in_from_the_environment(tmp_path: Path):
    text = (ROOT / "configs/presets/quickstart.yaml").read_text().replace("name: quickstart", "name: ${HOME}")
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"name is '\$\{HOME\}'; nothing is filled in"):
        load_config(file)


def test_a_secret_in_a_wrong_place_is_not_shown():
    text = refusal("reward.graders.0.api_key=sk-12345")
    assert "sk-12345" not in text
    assert "(hidden)" in text
    assert "scripted.seconds_per_token is nan" in refusal("rollout.scripted.seconds_per_token=.nan")


@pytest.mark.parametrize("name", preset_names())
def test_a_dumped_config_is_read_back_the_same(name: str):
    config = load_config(name)
    assert check_config(dump_config(config)) == config


def test_a_refusal_survives_pickling():
    error = ConfigError("run.yaml", [Problem("seed", 1.5, "it must be an integer", "write 1")])
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.problems) == (str(error), error.problems)


def test_a_config_cannot_be_changed():
    config = load_config("quickstart")
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3


def test_reading_a_config_imports_nothing_heavy():
    code = (
        "import sys; from configs.load import load_config; load_config('quickstart');"
        "print(sorted({'torch','ray','prefect','vllm','transformers','tensordict'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
