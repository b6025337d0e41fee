"""Starting Ray and reaching it: TLS, pings, versions and addresses, and the size of its store."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray is not installed")

from heloco.cluster.ray import RayLink, start_ray
from heloco.cluster.ray.probe import probe
from heloco.cluster.ray.ray_cluster import Tls, check_versions, ray_settings
from heloco.cluster.ray.ray_internals import PINGS
from heloco.cluster.ray.store import store_bytes
from heloco.cluster.server.process import spec_of
from heloco.errors import UserError
from support.ray_runs import LONGEST_S, config
from support.runs import TINY_MODEL, heloco

# ---- closed


def test_rays_own_settings_for_tls_are_found(monkeypatch):
    assert Tls.from_environment() is None
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_SERVER_CERT", "/some/cert.pem")
    with pytest.raises(UserError, match="RAY_TLS_SERVER_KEY, RAY_TLS_CA_CERT is not: set all of them"):
        start_ray("127.0.0.1:1")


def test_a_person_reads_that_ray_is_started_before_it_takes_its_time(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_USE_TLS", "1")  # and nothing else: so Ray is not really started
    result = heloco("train", "--engine", "ray", *TINY_MODEL, "--arrivals", "2", "--out", tmp_path / "run")
    assert result.code == 2 and result.out == "Starting Ray …\n" and "RAY_USE_TLS is set" in result.sentence, result
    result = heloco("join", "ray:127.0.0.1:1")
    assert result.code == 2 and result.out == "Connecting to Ray …\n", result


def test_in_another_s_ray_nobody_pings_more_often_than_it_allows():
    """Four workers in four minutes were lost to "too_many_pings" in a cluster that `ray start` had made."""
    assert not set(PINGS) & set(ray_settings(token="t", tls=None, loopback=False))


def test_beyond_loopback_there_must_be_tls():
    with pytest.raises(UserError, match="unencrypted"):
        start_ray(host="192.0.2.7")


WITH_TLS = """
import json, signal, sys
from pathlib import Path
from heloco.cluster.ray.probe import probe
from heloco.cluster.ray.ray_cluster import Tls, start_ray
from heloco.cluster.ray.ray_internals import keep_sigterm_handler
from heloco.errors import UserError
def is_sigterm_caught():
    [mask] = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt:")]
    return bool(int(mask, 16) >> signal.SIGTERM - 1 & 1)
signal.signal(signal.SIGTERM, lambda *_: None)
folder = sys.argv[1]
tls = Tls(f"{folder}/cert.pem", f"{folder}/key.pem", f"{folder}/ca.pem")
cluster = start_ray(tls=tls)
token = cluster.token_file.read_text()
probe(cluster.address, token, Tls.from_environment())
import ray
class Echo:
    def say(self, word):
        return word
answers = {"echo": ray.get(ray.remote(Echo).remote().say.remote("heard"), timeout=60)}
stranger = Tls(f"{folder}/other.pem", f"{folder}/other-key.pem", f"{folder}/ca.pem")
for name, how in (("plain", None), ("stranger", stranger)):
    try:
        probe(cluster.address, token, how)
    except UserError as error:
        answers[name] = str(error)
with keep_sigterm_handler():
    ray.shutdown()
    answers["caught"] = [is_sigterm_caught()]
answers["caught"].append(is_sigterm_caught())
cluster.stop()
print(json.dumps(answers))
"""


def make_certificates(folder: Path) -> None:
    """An authority, a certificate of it for loopback, and one that signed itself."""
    signed = ["-CA", "ca.pem", "-CAkey", "ca-key.pem"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    new = ["openssl", "req", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    commands = [
        [*new, "-x509", "-subj", "/CN=authority", "-keyout", "ca-key.pem", "-out", "ca.pem"],
        [*new, "-x509", "-subj", "/CN=head", *names, *signed, "-keyout", "key.pem", "-out", "cert.pem"],
        [*new, "-x509", "-subj", "/CN=stranger", *names, "-keyout", "other-key.pem", "-out", "other.pem"],
    ]  # fmt: skip
    for command in commands:
        subprocess.run(command, cwd=folder, check=True, capture_output=True)


def test_with_tls_ray_works_and_whoever_has_no_certificate_of_its_authority_is_refused(tmp_path):
    try:
        make_certificates(tmp_path)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("there is no openssl that can make certificates here")
    bare = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", WITH_TLS, str(tmp_path)]
    result = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=LONGEST_S)
    assert result.returncode == 0, result.stderr
    answers = json.loads(result.stdout.splitlines()[-1])
    assert answers["echo"] == "heard"
    assert "not as Ray does without TLS" in answers["plain"]
    assert "not as Ray does with TLS" in answers["stranger"]
    assert answers["caught"] == [False, True], "keep_sigterm_handler: ray.shutdown removes the handler, and it is restored"


# ---- sentences


def test_another_version_of_ray_is_named_with_ours():
    with pytest.raises(
        UserError, match=re.escape("The cluster's Ray is 2.9.3 and this machine's is 2.60.0: `pip install ray==2.9.3`")
    ):
        check_versions("2.60.0", "2.9.3")


def test_without_ray_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=re.escape('pip install "heloco[cluster]"')):
        RayLink("ray:head:6379")


@pytest.mark.parametrize(("address", "says"), [("127.0.0.1:9", "Nothing answers at"), ("head", "give HOST:PORT")])
def test_an_address_where_no_ray_is_is_named(address, says):
    with pytest.raises(UserError, match=says):
        probe(address, "", None)


def test_a_port_that_speaks_something_else_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(UserError, match="not as Ray does"):
        probe(f"127.0.0.1:{server.getsockname()[1]}", "", None)


def test_the_store_holds_a_model_for_each_worker_and_two(tmp_path):
    size = store_bytes(spec_of(config(paces=[1.0] * 4), tmp_path / "none"))
    tokens = 2 * 257 * 32 + 16 * 32
    assert 4 * 6 * tokens < size < 4 * 6 * (tokens + 13 * 32 * 32 + 2000)
