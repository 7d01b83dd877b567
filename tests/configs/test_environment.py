"""What the environment of every process is before a library reads it."""

import os
from urllib.request import proxy_bypass_environment

import pytest

from configs.environment import apply_defaults

PROXIES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy of the machine's own; what a test changes is taken back."""
    for key in PROXIES:
        monkeypatch.delenv(key, raising=False)
    for key in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(key, "")  # so that monkeypatch restores it
        monkeypatch.delenv(key)


@pytest.mark.parametrize("key", PROXIES)
def test_a_proxy_never_stands_between_a_run_and_its_own_servers(key: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(key, "http://proxy.example:3128")
    apply_defaults()
    for host in ("127.0.0.1", "localhost", "::1"):
        assert proxy_bypass_environment(host)
    assert not proxy_bypass_environment("judge.example")


def test_hosts_that_the_user_keeps_from_the_proxy_stay_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "judge.example, localhost")
    monkeypatch.setenv("NO_PROXY", "judge.example")
    apply_defaults()
    assert os.environ["no_proxy"] == "judge.example,localhost,127.0.0.1,::1"
    apply_defaults()
    assert os.environ["NO_PROXY"] == "judge.example,127.0.0.1,localhost,::1"


def test_without_a_proxy_nothing_is_excluded():
    apply_defaults()
    assert "NO_PROXY" not in os.environ
    assert "no_proxy" not in os.environ
