"""What a peer is run with: the environment of whoever compares, not ours."""

import json
import os
import subprocess
import sys

from benchmarks.peers import ROOT, peer_environment
from configs.environment import DEFAULTS


def test_a_peer_has_the_users_own_settings_and_of_ours_only_what_keeps_it_private():
    given = {"PATH": "/bin", "OMP_WAIT_POLICY": "ACTIVE", "DO_NOT_TRACK": "0"}
    private = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    assert peer_environment(given) == {**given, **private}


def test_what_counts_as_given_is_read_before_our_settings_are_made():
    """In a process of its own: our settings are in this one already."""
    code = "import json, os; from benchmarks import peers; print(json.dumps([peers.GIVEN, dict(os.environ)]))"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "GOMP_SPINCOUNT": "7"}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    given, made = json.loads(ended.stdout)
    assert DEFAULTS.keys() & given.keys() == {"GOMP_SPINCOUNT"}
    assert (given["GOMP_SPINCOUNT"], made["GOMP_SPINCOUNT"], made["OMP_WAIT_POLICY"]) == ("7", "7", "PASSIVE")
