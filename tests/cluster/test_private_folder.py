"""The folder of a Ray that we start: ours alone, checked before it is used, and attacked by another user."""

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from heloco.cluster.ray.private_folder import PrivateFolder, check_secret, read_own
from heloco.cluster.ray.ray_internals import ADDRESS_FILE
from heloco.errors import UserError

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
OTHER = 12345


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a short path, of this user alone; XDG_RUNTIME_DIR is not set."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def a_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").touch()
    return folder


def test_it_lies_in_the_users_runtime_folder_if_that_is_private(short, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    private_folder = PrivateFolder.make(None)
    assert private_folder.path.parent == short and stat.S_IMODE(private_folder.path.stat().st_mode) == 0o700
    assert private_folder.rays_own.parent == private_folder.path and not private_folder.rays_own.exists()
    private_folder.remove()
    assert not list(short.iterdir())
    short.chmod(0o755)
    elsewhere = PrivateFolder.make(None)
    assert elsewhere.path.parent != short
    elsewhere.remove()


def test_else_it_lies_in_the_folder_of_a_run_that_has_begun_and_has_a_short_path(short):
    run = a_run(short / "r")
    private_folder = PrivateFolder.make(run)
    assert private_folder.path.parent == run
    private_folder.remove()
    assert [path.name for path in run.iterdir()] == ["config.toml"]
    for run in (short / "new", a_run(short / ("long" * 20))):
        private_folder = PrivateFolder.make(run)
        assert private_folder.path.parent == Path(tempfile.gettempdir())
        private_folder.remove()


def test_without_a_safe_place_the_remedy_is_named(short, monkeypatch):
    shared = short / "s"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    monkeypatch.setattr("heloco.cluster.ray.private_folder.SHORT", shared)
    with pytest.raises(UserError, match=r"others may rename what is in it.*set XDG_RUNTIME_DIR or TMPDIR .*--ray off"):
        PrivateFolder.make(None)
    shared.chmod(0o1777)
    PrivateFolder.make(None).remove()
    monkeypatch.setattr("heloco.cluster.ray.private_folder.SHORT", a_run(short / ("long" * 20)))
    monkeypatch.setattr(tempfile, "tempdir", str(short / ("long" * 20)))
    with pytest.raises(UserError, match="cannot hold Ray's sockets"):
        PrivateFolder.make(None)


def test_a_folder_that_was_opened_or_replaced_by_a_link_is_noticed_before_anything_in_it_is_read(short):
    folder = PrivateFolder.make(a_run(short / "r"))
    (folder.path / "token").write_text("secret")
    assert folder.read(folder.path / "token") == "secret" and folder.read(folder.path / "none") == ""
    folder.path.chmod(0o755)
    with pytest.raises(UserError, match="somebody has changed it"):
        folder.read(folder.path / "token")
    folder.path.chmod(0o700)
    moved = folder.path.rename(short / "moved")
    folder.path.symlink_to(moved)
    with pytest.raises(UserError, match="somebody has changed it"):
        folder.check()
    folder.remove()
    assert (moved / "token").exists(), "what a link names is not removed"


@as_root
def test_what_belongs_to_another_user_is_not_used(short):
    folder = PrivateFolder.make(a_run(short / "r"))
    planted = folder.path / ADDRESS_FILE
    planted.write_text("127.0.0.1:6379")
    os.chown(planted, OTHER, OTHER)
    with pytest.raises(UserError, match="not a plain file of this user"):
        folder.read(planted)
    os.chown(folder.path, OTHER, OTHER)
    with pytest.raises(UserError, match="somebody has changed it"):
        folder.check()
    os.chown(folder.path, 0, 0)
    os.chown(folder.path.parent, OTHER, OTHER)
    with pytest.raises(UserError, match="is another user's"):
        folder.check()


def test_a_secret_is_a_plain_file_that_nobody_else_may_read(tmp_path):
    secret, link = tmp_path / "secret", tmp_path / "link"
    secret.write_text("s")
    secret.chmod(0o644)
    link.symlink_to(secret)
    with pytest.raises(UserError, match="chmod 600"):
        check_secret(secret)
    secret.chmod(0o600)
    check_secret(secret)
    with pytest.raises(UserError, match="cannot be read safely"):
        read_own(link)
    with pytest.raises(UserError, match="not a plain file"):
        read_own(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_own(tmp_path / "none")


@as_root
def test_another_user_of_the_machine_gets_nowhere(tmp_path):
    pytest.importorskip("ray", reason="ray is not installed")
    pytest.importorskip("grpc", reason="grpc is not installed")
    import ray_folder

    figures = ray_folder.attack(tmp_path, seconds=8.0)
    assert figures["tries"] > 20
