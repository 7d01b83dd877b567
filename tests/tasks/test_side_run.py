"""Who is started for a part of the work."""

from configs.layout import process_groups
from configs.load import load_config
from configs.run import RunConfig
from tasks.side_run import duties_in


def started(config: RunConfig, *duties: str) -> list[list[str]]:
    """Duties of each group of processes that has any."""
    found = [duties_in(config, group, duties) for group in process_groups(config)]
    return [one for one in found if one]


def test_an_evaluation_starts_the_environments_that_its_rollouts_ask():
    config = load_config(
        "quickstart-tools", ["rollout.tools={environment: 'my.worlds:Chess'}", "roles.env={pool: main}"]
    )
    assert started(config, "rollout", "reward") == [["rollout"], ["reward"], ["env"]]
    assert started(config, "actor", "rollout", "reward") == [["actor", "rollout"], ["reward"], ["env"]]


def test_an_evaluation_starts_the_models_that_its_graders_ask():
    model = "{path: scorer}"
    graders = [
        f"{{name: liked, kind: model, model: {model}}}",
        f"{{name: judged, kind: judge, judge: {{prompt: '{{response}}?', serve: {model}}}}}",
    ]
    config = load_config("quickstart", [f"reward.graders=[{', '.join(graders)}]"])
    assert started(config, "rollout", "reward") == [["rollout"], ["reward", "reward_model.liked", "judge.judged"]]


def test_a_fit_starts_the_actor_and_what_reads_its_data_and_nothing_else():
    config = load_config("quickstart")
    assert started(config, "actor", "demonstrations") == [["actor", "demonstrations"]]
    assert started(config, "reward_trainer", "preferences") == [["reward_trainer", "preferences"]]
