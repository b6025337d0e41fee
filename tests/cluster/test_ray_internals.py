"""What `ray/ray_internals.py` uses of Ray and does not find in its documentation. Where one of these fails, a new version of Ray
has other names: that module has to follow, before anything else is looked at."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.repository import REPOSITORY, TESTS

ray = pytest.importorskip("ray", reason="ray is not installed")

import ray._common.utils as ray_utils  # noqa: E402
import ray._private.auto_init_hook as auto_init_hook  # noqa: E402
import ray._private.ray_constants as ray_constants  # noqa: E402
import ray._private.ray_logging as ray_logging  # noqa: E402
import ray._private.services as services  # noqa: E402
import ray._private.utils as version_check  # noqa: E402
import ray._raylet as core  # noqa: E402
from grpc._cython import cygrpc  # noqa: E402
from ray._private.authentication import authentication_constants  # noqa: E402

from heloco.cluster.ray import head_main, ray_internals  # noqa: E402
from heloco.cluster.ray.ray_cluster import translate  # noqa: E402

ROOT = Path(ray.__file__).parent
SOURCE = REPOSITORY / "src" / "heloco"


@pytest.mark.parametrize(
    "name", [*ray_internals.KEEPALIVE, *ray_internals.PINGS, *ray_internals.QUIET, *ray_internals.LOOPBACK_ONLY]
)
def test_ray_knows_the_setting(name):
    setting = name.removeprefix("RAY_")
    if setting.islower():  # of its own processes, which are compiled
        assert setting.encode() in (ROOT / "core" / "src" / "ray" / "raylet" / "raylet").read_bytes()
    else:
        assert any(name in path.read_text() for part in ("_private", "_common") for path in (ROOT / part).rglob("*.py"))


def test_the_functions_are_there_and_take_these_arguments(monkeypatch):
    assert all(isinstance(each, str) for each in services.find_node_ids())  # other tests may run nodes
    assert isinstance(ray_internals.is_node_here(), bool)
    assert isinstance(ray_constants.ENABLE_RAY_CLUSTER, bool) and isinstance(auto_init_hook.enable_auto_connect, bool)
    assert callable(core.Config.initialize) and callable(core.AuthenticationTokenLoader.instance().reset_cache)
    assert isinstance(ray_logging.stdout_deduplicator.skip_re, re.Pattern | None)
    with monkeypatch.context() as patch:
        for name in (*ray_internals.QUIET, *ray_internals.LOOPBACK_ONLY):
            patch.setenv(name, "0")
        ray_internals.reread_settings()
        assert (ray_constants.ENABLE_RAY_CLUSTER, auto_init_hook.enable_auto_connect) == (False, False)
        for name in (*ray_internals.QUIET, *ray_internals.LOOPBACK_ONLY):
            patch.setenv(name, "1")
        ray_internals.reread_settings()
        assert (ray_constants.ENABLE_RAY_CLUSTER, auto_init_hook.enable_auto_connect) == (True, True)
    ray_internals.reread_settings()


def version_error(version: str) -> RuntimeError:
    """What Ray itself raises in a process that joins a cluster of this other version."""
    python_version = ".".join(map(str, sys.version_info[:3]))
    with pytest.raises(RuntimeError) as refused:
        version_check.check_version_info({"ray_version": version, "python_version": python_version}, "here")
    return refused.value


def test_ray_names_both_versions_in_its_error():
    error = version_error("2.9.3")
    assert ray_internals.versions_in(error) == ("2.9.3", ray.__version__)
    assert f"The cluster's Ray is 2.9.3 and this machine's is {ray.__version__}: " in str(translate(error, "head:6379"))
    assert ray_internals.versions_in(RuntimeError("Ray: 1\nRay: 1")) is None
    assert ray_internals.versions_in(RuntimeError("another error")) is None


def test_ray_writes_its_address_to_that_file(tmp_path):
    assert Path(ray_utils.get_ray_address_file(str(tmp_path))) == tmp_path / ray_internals.ADDRESS_FILE


def test_ray_answers_the_requests_that_probe_it():
    service, method = ray_internals.CLUSTER_REQUEST.strip("/").split("/")
    binary = (ROOT / "core" / "src" / "ray" / "gcs" / "gcs_server").read_bytes()
    assert service.encode() in binary and method.encode() in binary
    assert ray_internals.CLIENTS_REQUEST in (ROOT / "core" / "generated" / "ray_client_pb2_grpc.py").read_text()


def test_ray_sends_its_token_in_that_header():
    """`test_ray_runs.py` shows it to a running Ray."""
    constants = authentication_constants
    name, prefix = constants.AUTHORIZATION_HEADER_NAME, constants.AUTHORIZATION_BEARER_PREFIX
    assert ray_internals.token_header("secret") == (name, f"{prefix}secret")


def test_the_script_that_starts_ray_finds_its_command():
    """`head_main.py` calls it in its own process, to end with its parent."""
    command = [sys.executable, "-P", head_main.__file__, "", ray_internals.COMMAND, "--help"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        options = set(re.findall(r"--[a-z-]+", process.stdout.read()))
    assert options >= {
        "--head", "--block", "--address", "--node-ip-address", "--port", "--ray-client-server-port", "--temp-dir",
        "--object-store-memory", "--include-dashboard", "--include-log-monitor", "--disable-usage-stats",
    }  # fmt: skip


def test_ray_start_has_the_hidden_option():
    """In a process of its own, because the command line imports all libraries of Ray."""
    script = f"from {ray_internals.COMMAND} import start; print(*(o for p in start.params if p.hidden for o in p.opts))"
    options = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert ray_internals.NO_MONITOR in options


def test_grpc_knows_the_setting_about_forks():
    [name] = ray_internals.NO_FORK_SUPPORT
    assert name.encode() in Path(cygrpc.__file__).read_bytes()


def test_ray_replaces_our_handler_of_sigterm_which_is_restored():
    """`ray.init` does so before it looks at its arguments, so here it can fail. `test_ray_reach.py` tests `ray.shutdown`."""

    def stop(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with ray_internals.keep_sigterm_handler():
            with pytest.raises(RuntimeError, match="Unknown keyword"):
                ray.init(no_such_option=True)
            assert signal.getsignal(signal.SIGTERM) is not stop, "Ray no longer does this: keep_sigterm_handler is not needed"
        assert signal.getsignal(signal.SIGTERM) is stop
    finally:
        signal.signal(signal.SIGTERM, before)


INSIDE = re.compile(r"(\bray|_ray|ray\(\))\._(?!_)|_raylet|ray\.scripts|ray\.rpc|\"ray_current_cluster|session_\d|plasma_store")
"""`ray` is also an argument, `self._ray`, or what `require_ray()` returns."""
INSIDE_RAYS_ROOM = re.compile(r"[\"']authorization[\"']|Bearer ")
"""Elsewhere such a header is that of the gateway."""
ROOM = SOURCE / "cluster" / "ray"
USERS = [path for folder in ("src", "tests", "benchmarks", "examples") for path in (REPOSITORY / folder).rglob("*.py")]
ATTACK = TESTS / "attack" / "ray_folder.py"
"""The attacker knows Ray, and uses nothing of the package."""


def test_nothing_else_uses_rays_insides():
    users = {path for path in USERS if INSIDE.search(path.read_text())}
    users |= {path for path in ROOM.rglob("*.py") if INSIDE_RAYS_ROOM.search(path.read_text())}
    assert users == {ROOM / "ray_internals.py", Path(__file__), ATTACK}


@pytest.mark.parametrize(
    "line",
    [
        "import ray._private.worker", "from ray._raylet import Config", "self._ray._private.worker.global_worker",
        "require_ray()._private", 'import_module("ray._common.utils")', 'import_module("ray.scripts.scripts")',
        'LONGEST_SOCKET = "session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"',
    ],
)  # fmt: skip
def test_the_search_for_rays_insides_finds_every_form(line):
    assert INSIDE.search(line) and not INSIDE.search("self._ray.__version__, self._ray.get(x), array._private")


def test_the_search_finds_rays_token_header():
    assert INSIDE_RAYS_ROOM.search('metadata = [("authorization", f"Bearer {token}")] if token else []')
