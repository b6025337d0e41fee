"""The gateway's certificate and key: made once or brought along, judged by the fingerprint and not by a clock."""

import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from heloco.cluster.gateway.credentials import Credentials, self_signed
from heloco.cluster.gateway.https_link import HttpsLink
from heloco.cluster.gateway.https_server import GatewayServer
from heloco.cluster.server.open_run import new_run
from heloco.errors import UserError
from support.gateways import Served

pytest.importorskip("httpx", reason="httpx is not installed")
pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("cryptography", reason="cryptography is not installed")

pytestmark = pytest.mark.usefixtures("one_thread")


def test_credentials_are_made_once_and_are_their_owners_alone(tmp_path):
    credentials = Credentials.load_or_make(tmp_path / "credentials", ["head", "10.0.0.7", "::1"])
    reloaded_credentials = Credentials.load_or_make(tmp_path / "credentials")
    assert credentials.fingerprint == reloaded_credentials.fingerprint
    assert stat.S_IMODE((tmp_path / "credentials").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "credentials").iterdir()} == {0o600}


def test_a_bad_host_name_and_a_broken_folder_are_sentences(tmp_path):
    with pytest.raises(UserError, match="neither the name nor the address"):
        Credentials.load_or_make(tmp_path / "a", ["gerät"])
    folder = tmp_path / "credentials"
    Credentials.load_or_make(folder)
    for name in ("certificate.pem", "key.pem"):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(b"broken")
        with pytest.raises(UserError, match=r"restore it|remove .*|belongs together"):
            Credentials.load_or_make(folder)
        (folder / name).write_bytes(before)


def _write_pair(folder: Path, begin_days: int, end_days: int) -> dict[str, str]:
    now = datetime.now(UTC)
    folder.mkdir(parents=True, exist_ok=True)
    certificate, key = self_signed(["head"], now + timedelta(days=begin_days), now + timedelta(days=end_days))
    (folder / "certificate.pem").write_bytes(certificate)
    (folder / "key.pem").write_bytes(key)
    return {"cert": str(folder / "certificate.pem"), "key": str(folder / "key.pem")}


def test_our_certificate_outlives_every_run_and_stays_even_where_an_old_one_has_expired(tmp_path):
    credentials = Credentials.load_or_make(tmp_path)
    ends = ssl._ssl._test_decode_cert(str(credentials.certificate))["notAfter"]  # type: ignore[attr-defined]
    assert ends == "Dec 31 23:59:59 9999 GMT"
    _write_pair(tmp_path, -400, -30)
    old = Credentials.load_or_make(tmp_path)
    assert old.fingerprint != credentials.fingerprint
    assert Credentials.load_or_make(tmp_path) == old


def test_a_certificate_of_ones_own(tiny, tmp_path):
    certificate_pair = _write_pair(tmp_path / "own", -10, 10)
    served = Served(new_run(*tiny, tmp_path / "run"), tmp_path / "run", **certificate_pair)
    assert served.link().describe().run == served.run
    served.close()
    with pytest.raises(UserError, match="belong together"):
        Credentials.load_or_make(tmp_path / "c", cert=certificate_pair["cert"])
    with pytest.raises(UserError, match=r"valid from .* not today: give one .*one that does not expire is made"):
        Credentials.load_or_make(tmp_path / "c", **_write_pair(tmp_path / "old", -30, -1))
    other = _write_pair(tmp_path / "other", -1, 1)["key"]
    with pytest.raises(UserError, match="is not the key of"):
        Credentials.load_or_make(tmp_path / "c", cert=certificate_pair["cert"], key=other)


@pytest.mark.parametrize("days", [(-30, -1), (1, 30), (-20_000, -10_000), (10_000, 20_000)])
def test_a_certificate_is_judged_by_its_fingerprint_and_not_by_the_clock_of_a_machine(tiny, tmp_path, days):
    """For a clock that is wrong by years, a good certificate is what this one is for ours."""
    folder = tmp_path / "run"
    service = new_run(*tiny, folder)
    _write_pair(folder / "credentials", *days)
    served = Served(service, folder)
    link, token = served.link(), served.host.token("worker")
    assert link.describe().run == served.run
    link.close()
    served.server.stop()
    _write_pair(folder / "credentials", *days)
    changed = GatewayServer(served.host, Credentials.load_or_make(folder / "credentials"), "127.0.0.1", served.port)
    changed.start()
    with pytest.raises(UserError, match="is not the one in the token"):
        link.describe()
    with pytest.raises(UserError, match="is not the one in the token"):
        HttpsLink(changed.address, token).describe()
    changed.stop()
    served.close()
