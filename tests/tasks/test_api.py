"""Which Prefect server a run talks to, and who says so."""

import pytest
from prefect.context import use_profile
from prefect.settings import PREFECT_API_URL, Profile, temporary_settings

from configs.training import PrefectConfig
from tasks.api import source_of_url


def test_whoever_names_the_server_is_told_with_how_it_comes_to_name_none(monkeypatch: pytest.MonkeyPatch):
    named, profile = "http://127.0.0.1:4998/api", Profile(name="team", settings={PREFECT_API_URL: "http://team/api"})
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        assert source_of_url(PrefectConfig(api_url=named)) == ("prefect.api_url", "leave it out of the config")
        monkeypatch.delenv("PREFECT_API_URL", raising=False)
        with use_profile(profile):
            assert source_of_url(PrefectConfig()) == (
                "the active Prefect profile 'team'",
                "take it out of that (`prefect config unset PREFECT_API_URL`, or `prefect profile use ANOTHER`)",
            )
        monkeypatch.setenv("PREFECT_API_URL", named)
        with use_profile(profile):  # the environment goes before it
            assert source_of_url(PrefectConfig()) == ("PREFECT_API_URL", "unset it")
    with temporary_settings({PREFECT_API_URL: "http://file/api"}):
        assert source_of_url(PrefectConfig())[0] == "a Prefect setting"
