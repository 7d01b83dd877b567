"""From a file or a preset's name, and `--set` overrides, to a checked `RunConfig`.

Whatever is wrong is collected and said once, in one block: path, value, rule and way out. Nothing is substituted
from the environment: a secret is named (`api_key_env`), never written.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from configs.explain import explain, nearest
from configs.problems import ConfigError, Problem, as_written
from configs.run import RunConfig
from configs.yaml_reader import read_plain_yaml

_VARIABLE = re.compile(r"\s*(?:\S*\$\{[A-Za-z_]\w*\}\S*|\$[A-Z_][A-Z0-9_]*(?:/\S*)?)\s*\Z")
"""A single word that holds a shell's variable: a path, a name, an address. Longer texts may mean their dollars."""
PRESETS = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """Names of the presets that come with Callsheet, sorted."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file or a preset, lay the overrides over it and check everything.

    Args:
        source: a path to a YAML file, or a preset's name, for example "quickstart".
        overrides: "dotted.path=value" each, the value read as YAML, for example "actor.optimizer.lr=1e-4".

    Raises:
        ConfigError: with all problems at once.
    """
    path = _find(source)
    data = _read(path)
    problems = list(_interpolations(data, ""))
    for override in overrides:
        problem = apply_override(data, override)
        if problem is not None:
            problems.append(problem)
    if problems:
        raise ConfigError(str(source), problems)
    return check_config(data, origin=str(source))


def check_config(data: object, origin: str = "config") -> RunConfig:
    """Validate plain data (for example a run directory's resolved config). Raises ConfigError."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(origin, explain(error)) from None


def dump_config(config: RunConfig) -> dict[str, Any]:
    """Plain JSON data that `check_config` reads back to an equal config."""
    return config.model_dump(mode="json")


def config_digest(config: RunConfig) -> str:
    """Identifies what must be the same for a resume to be exact."""
    return hashlib.blake2b(json.dumps(dump_config(config), sort_keys=True).encode(), digest_size=16).hexdigest()


def apply_override(data: dict[str, Any], override: str) -> Problem | None:
    """Set one dotted path in place; a problem instead when the override is malformed."""
    dotted, equals, text = override.partition("=")
    segments = dotted.split(".")
    if not equals:
        return Problem("--set", override, "an override is written path=value", "for example --set seed=1")
    if any(not segment or segment != segment.strip() for segment in segments):
        return Problem("--set", override, "the path has an empty segment", "write section.key=value without spaces")
    if not text.strip():
        return Problem(
            "--set", override, "there is no value", f"write {dotted}=null to unset it, {dotted}='' for no text"
        )
    try:
        value = read_plain_yaml(text)
    except yaml.YAMLError as error:
        why = error.problem if isinstance(error, yaml.MarkedYAMLError) else None
        rule = "the value is not YAML" + (f": {why}" if why else "")
        return Problem("--set", override, rule, "quote it, for example name='a: b'")
    return _set(data, "", segments, value) or next(_interpolations(value, dotted), None)


def _set(here: object, walked: str, rest: list[str], value: object) -> Problem | None:
    segment, rest = rest[0], rest[1:]
    path = f"{walked}.{segment}" if walked else segment
    if isinstance(here, list):
        entries = cast("list[object]", here)
        if not segment.isdecimal() or int(segment) >= len(entries):
            return Problem("--set", path, f"the list has {len(entries)} entries", "give an index, counted from 0")
        if not rest:
            entries[int(segment)] = value
            return None
        return _set(entries[int(segment)], path, rest, value)
    if isinstance(here, dict):
        section = cast("dict[str, object]", here)
        if not rest:
            section[segment] = value
            return None
        if section.get(segment) is None:
            section[segment] = {}
        return _set(section[segment], path, rest, value)
    return Problem("--set", walked, f"it holds {as_written(here)}, which has no keys", "shorten the path")


def _find(source: str | Path) -> Path:
    path = Path(source)
    names = preset_names()
    known = "the presets are " + ", ".join(names)
    wanted = f"give a YAML file or a preset; {known}"
    try:
        if path.is_file():
            return path
        is_folder = str(source) not in names and path.is_dir()
    except OSError as error:  # a name that is too long, or a folder that may not be entered
        raise _refused(source, f"it cannot be read: {error.strerror}", wanted) from None
    if is_folder:
        raise _refused(source, "it is a folder", wanted.replace("YAML file", "YAML file, say config.yaml in it,"))
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise _refused(source, "there is no such file", wanted)
    if str(source) in names:
        return PRESETS / f"{source}.yaml"
    close = nearest(str(source), names)
    hint = f"did you mean {close}? " if close else ""
    raise _refused(source, "it is neither a file nor a preset", hint + known)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = read_plain_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refused(path, f"it cannot be read: {error.strerror}", "check the file's permissions") from None
    except UnicodeDecodeError:
        raise _refused(path, "it is not UTF-8 text", "save it as UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise _refused(path, where + (error.problem or "it is not YAML"), "correct it there") from None
    except yaml.YAMLError as error:
        raise _refused(path, f"it is not YAML: {error}", "correct it there") from None
    if not isinstance(data, dict):
        raise _refused(path, "it holds no section", "see configs/presets/quickstart.yaml for one that does")
    return cast("dict[str, Any]", data)


def _refused(source: str | Path, rule: str, way_out: str) -> ConfigError:
    return ConfigError(str(source), [Problem("config", str(source), rule, way_out)])


def _interpolations(value: object, path: str) -> Iterator[Problem]:
    if isinstance(value, dict):
        for key, inside in cast("dict[str, object]", value).items():
            yield from _interpolations(inside, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, inside in enumerate(cast("list[object]", value)):
            yield from _interpolations(inside, f"{path}.{index}")
    elif isinstance(value, str) and _VARIABLE.match(value):
        yield Problem(
            path,
            value,
            "nothing is filled in from the environment",
            "name the variable in a key such as api_key_env, or write the value",
        )
