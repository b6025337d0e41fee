"""What `ray/ray_internals.py` uses of Ray and does not find in its documentation. Where one of these fails, a new version of Ray
has other names: that module has to follow, before anything else is looked at."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.repository import REPOSITORY

ray = pytest.importorskip("ray", reason="ray is not installed")

import ray._common.utils as ray_utils  # noqa: E402
import ray._private.auto_init_hook as auto_init_hook  # noqa: E402
import ray._private.ray_constants as ray_constants  # noqa: E402
import ray._private.ray_logging as ray_logging  # noqa: E402
import ray._private.services as services  # noqa: E402
import ray._raylet as core  # noqa: E402

from heloco.cluster.ray import head_main, ray_internals  # noqa: E402

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


def test_ray_names_both_versions_in_its_error():
    python = ".".join(map(str, sys.version_info[:3]))
    with pytest.raises(RuntimeError) as refused:
        ray._private.utils.check_version_info({"ray_version": "2.9.3", "python_version": python}, "here")
    assert ray_internals.versions_in(refused.value) == ("2.9.3", ray.__version__)
    assert ray_internals.versions_in(RuntimeError("Ray: 1\nRay: 1")) is None
    assert ray_internals.versions_in(RuntimeError("another error")) is None


def test_ray_writes_its_address_to_that_file(tmp_path):
    assert Path(ray_utils.get_ray_address_file(str(tmp_path))) == tmp_path / ray_internals.ADDRESS_FILE


def test_ray_answers_the_requests_that_probe_it():
    service, method = ray_internals.CLUSTER_REQUEST.strip("/").split("/")
    binary = (ROOT / "core" / "src" / "ray" / "gcs" / "gcs_server").read_bytes()
    assert service.encode() in binary and method.encode() in binary
    assert ray_internals.CLIENTS_REQUEST in (ROOT / "core" / "generated" / "ray_client_pb2_grpc.py").read_text()


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


INSIDE = re.compile(r"(\bray|_ray|ray\(\))\._(?!_)|_raylet|ray\.scripts|ray\.rpc|\"ray_current_cluster")
"""`ray` is also an argument, `self._ray`, or what `require_ray()` returns."""


def test_nothing_else_of_the_package_uses_rays_insides():
    users = {path.name for path in SOURCE.rglob("*.py") if INSIDE.search(path.read_text())}
    assert users == {"ray_internals.py"}


@pytest.mark.parametrize(
    "line",
    [
        "import ray._private.worker", "from ray._raylet import Config", "self._ray._private.worker.global_worker",
        "require_ray()._private", 'import_module("ray._common.utils")', 'import_module("ray.scripts.scripts")',
    ],
)  # fmt: skip
def test_the_search_for_rays_insides_finds_every_form(line):
    assert INSIDE.search(line) and not INSIDE.search("self._ray.__version__, self._ray.get(x), array._private")
