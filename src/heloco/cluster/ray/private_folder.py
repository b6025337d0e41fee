"""The folder of a Ray that we start, which no other user may enter.

Ray makes its own folder writable for everybody. Whoever can write there can name another address in
`ray_current_cluster`, receive Ray's token at it, and run code as the user of Ray. So Ray's folder
lies inside one that is ours alone, and that is checked before every use: owner, mode, no link, and
nobody else who could put another in its place.
"""

import contextlib
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from heloco.cluster.ray.ray_internals import LONGEST_SOCKET
from heloco.errors import UserError
from heloco.records.run_files import CONFIG

PREFIX, PREFIX_IN_RUN = "heloco-ray-", ".ray-"
SHORT = Path("/tmp")
"""The last folder to try, because the path of TMPDIR may be too long for sockets."""
RAYS_OWN = "r"
"""Ray's folder inside the private one. The name is short, because the path of a socket may have at most 107 bytes."""
TOKEN, START_LOG = "token", "start.log"


class PrivateFolder:
    """A folder that only this user may enter, for one Ray."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def make(cls, run: Path | None) -> "PrivateFolder":
        """Makes a folder in the user's runtime folder, else in the run's folder, else in the system's temporary folder."""
        trouble = "there is no place for it"
        for place, prefix in _places(run):
            try:
                folder = cls(Path(tempfile.mkdtemp(prefix=prefix, dir=place)))
            except OSError as error:
                trouble = f"{place}: {error.strerror}"
                continue
            try:
                folder.check()
                folder._check_sockets()
                return folder
            except (OSError, UserError) as error:
                trouble = str(error)
                folder.remove()
        raise UserError(
            f"Ray's files need a folder that nobody else can enter ({trouble}): set XDG_RUNTIME_DIR or TMPDIR to a folder of "
            "yours with a short path, or leave Ray out with --ray off."
        )

    @property
    def rays_own(self) -> Path:
        """Ray's --temp-dir."""
        return self.path / RAYS_OWN

    def check(self) -> None:
        """Raises UserError if another user could read or change what is in the folder."""
        info = os.lstat(self.path)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise UserError(f"{self.path} is not a folder of this user alone: somebody has changed it. Start again.")
        for parent in self.path.parents:
            parent_info = os.lstat(parent)
            is_shared = parent_info.st_mode & 0o022 and not parent_info.st_mode & stat.S_ISVTX
            if is_shared or parent_info.st_uid not in _trusted_owners():
                raise UserError(f"{parent} is another user's, or others may rename what is in it: {self.path} is not safe there.")

    def _check_sockets(self) -> None:
        """Raises UserError if Ray's sockets cannot be made here: the path may be too long, or the
        file system may not have them."""
        path = self.rays_own / LONGEST_SOCKET
        path.parent.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.bind(str(path))
            except OSError as error:
                raise UserError(f"{self.path} cannot hold Ray's sockets ({error})") from error
        shutil.rmtree(self.rays_own)

    def read(self, path: Path) -> str:
        """The text of a file in the folder; empty if it does not exist yet."""
        self.check()
        try:
            return read_own(path)
        except FileNotFoundError:
            return ""

    def remove(self) -> None:
        """Deletes the folder with all its files. A folder that is not ours any more is left as it is."""
        with contextlib.suppress(OSError, UserError):
            self.check()
            shutil.rmtree(self.path, ignore_errors=True)


def read_own(path: Path) -> str:
    """The text of a file that belongs to this user and is not a symbolic link."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read safely ({error.strerror}): give a plain file of this user.") from error
    info = os.fstat(handle)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
        os.close(handle)
        raise UserError(f"{path} is not a plain file of this user: somebody has put it there.")
    with os.fdopen(handle, encoding="utf-8", errors="replace") as file:
        return file.read()


def check_secret(path: Path) -> None:
    """Raises UserError if another user may read or write a secret file."""
    read_own(path)
    if os.lstat(path).st_mode & 0o077:
        raise UserError(f"Others may read or write {path}, which holds a secret: `chmod 600 {path}`.")


def _places(run: Path | None) -> Iterator[tuple[Path, str]]:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_absolute():
        with contextlib.suppress(OSError, UserError):
            place = PrivateFolder(Path(runtime).resolve())
            place.check()
            yield place.path, PREFIX
    if run is not None and (run / CONFIG).is_file():  # a run that is new must find its folder empty
        yield run.resolve(), PREFIX_IN_RUN
    yield Path(tempfile.gettempdir()).resolve(), PREFIX
    yield SHORT, PREFIX


def _trusted_owners() -> set[int]:
    """Root, this user, and in a container the user that stands for unmapped users."""
    owners = {0, os.geteuid()}
    with contextlib.suppress(OSError, ValueError):
        owners.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    return owners
