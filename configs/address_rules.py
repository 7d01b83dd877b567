"""Rules about what a config names outside itself: services, clusters, secrets, code of the user's own."""

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from configs.environment import is_secret_name
from configs.problems import Problem

if TYPE_CHECKING:
    from configs.run import RunConfig

_ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_HOST_AND_PORT = re.compile(r"^[^\s/@]+:(?!0+$)(?:\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])$")
_IMPORT_PATH = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")


def secrets_are_named(config: "RunConfig") -> Iterator[Problem]:
    """Keys come from the environment by name; an address carries none."""
    addresses = [("prefect.api_url", config.prefect.api_url), ("ray.address", config.ray.address)]
    for index, grader in enumerate(config.reward.graders):
        addresses.append((f"reward.graders.{index}.url", grader.url))
        if grader.judge is not None:
            path = f"reward.graders.{index}.judge"
            addresses.append((f"{path}.base_url", grader.judge.base_url))
            name = grader.judge.api_key_env
            if name is not None and not _ENV_NAME.match(name):
                rule = "it must be the name of an environment variable, never the key itself"
                yield Problem(f"{path}.api_key_env", "(hidden)", rule, "for example OPENAI_API_KEY")
    for path, address in addresses:
        if address is not None and "@" in address.rpartition("//")[2].partition("/")[0]:
            yield Problem(path, "(hidden)", "an address must not carry a password", "take the part before @ out")
        elif address is not None and (named := [key for key, _ in parse_qsl(_query(address)) if is_secret_name(key)]):
            rule = f"its query holds {named[0]}, and the config is stored with the run"
            yield Problem(path, "(hidden)", rule, "leave it out; a judge takes its key from api_key_env")


def _query(address: str) -> str:
    return address.partition("?")[2].partition("#")[0]


def addresses_are_whole(config: "RunConfig") -> Iterator[Problem]:
    """A service is asked over HTTP: what is no such address would fail for each response, hours later."""
    cluster = config.ray.address
    if cluster is not None and not _HOST_AND_PORT.match(cluster):
        rule = "a Ray cluster is a host and a port below 65536, without http://"
        yield Problem("ray.address", cluster, rule, "for example 10.0.0.1:6379, or leave it out to start one here")
    given = {"prefect.api_url": config.prefect.api_url}
    for index, grader in enumerate(config.reward.graders):
        given[f"reward.graders.{index}.url"] = grader.url
        given[f"reward.graders.{index}.judge.base_url"] = grader.judge.base_url if grader.judge is not None else None
    for path, address in given.items():
        if address is not None and "@" not in address and not _is_http(address):
            rule = "the address of a service is http:// or https://, a host, and a port below 65536 if any"
            yield Problem(path, address, rule, "for example http://127.0.0.1:8000/v1")


def _is_http(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and address.split() == [address]
        )
    except ValueError:  # a port that is none, a bracket that is not closed
        return False


def named_code(config: "RunConfig") -> dict[str, str]:
    """Key -> `module:function` of everything of the user's own that the config names."""
    given = {
        "algorithm.advantage": config.algorithm.advantage,
        "algorithm.loss": config.algorithm.loss,
        "rollout.servers.agent": config.rollout.servers.agent,
        **{f"roles.{role}.worker": where.worker for role, where in config.roles.items()},
    }
    for index, grader in enumerate(config.reward.graders):
        if grader.kind == "python":
            given[f"reward.graders.{index}.function"] = grader.function
    for section, sources in (("data", config.data.sources), ("validation", config.validation.sources)):
        for index, source in enumerate(sources):
            if source.kind == "python":
                given[f"{section}.sources.{index}.path"] = source.path
    if config.rollout.tools is not None:
        given["rollout.tools.environment"] = config.rollout.tools.environment
    for index, function in enumerate(config.rollout.tools.functions if config.rollout.tools else ()):
        given[f"rollout.tools.functions.{index}"] = function
    return {path: value for path, value in given.items() if value is not None}


def import_paths_are_whole(config: "RunConfig") -> Iterator[Problem]:
    """`module:function` names a function; anything else fails an hour later on another node."""
    for path, value in named_code(config).items():
        if not _IMPORT_PATH.match(value):
            yield Problem(path, value, "an import path is package.module:name", "for example my_project.rewards:score")


def local_cluster_settings_act(config: "RunConfig") -> Iterator[Problem]:
    """Sizes of a local cluster mean nothing to one that already runs."""
    if config.ray.address is not None:
        for name, value in (("num_cpus", config.ray.num_cpus), ("num_gpus", config.ray.num_gpus)):
            if value is not None:
                rule = f"ray.address is {config.ray.address!r}, and that cluster has its own size"
                yield Problem(f"ray.{name}", value, rule, "remove one of the two")
    if config.prefect.api_url is not None and config.prefect.home is not None:
        rule = f"prefect.api_url is {config.prefect.api_url!r}, and that server has its own database"
        yield Problem("prefect.home", config.prefect.home, rule, "remove one of the two")


RULES: tuple[Callable[["RunConfig"], Iterator[Problem]], ...] = (
    secrets_are_named,
    addresses_are_whole,
    import_paths_are_whole,
    local_cluster_settings_act,
)
