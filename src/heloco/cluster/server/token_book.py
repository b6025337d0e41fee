"""The tokens of a run. Each has one right, and can be revoked on its own.

worker   join, and do rounds
viewer   look at the page, the status and the run's files
admin    stop, pause, evict, make and revoke tokens; also look
"""

import hashlib
import secrets
import threading
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from heloco.cluster.protocol.messages import Right, TokenInfo
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.protocol.tokens import RIGHTS, format_token
from heloco.disk import disk_errors, write_atomically
from heloco.errors import UserError

FILE = "tokens.json"
TOKEN_LIMIT = 1000


class Token(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A token with its secret, as the run's folder keeps it."""

    id: str
    right: Right
    secret: str
    created: str
    """The day on which the token was made."""
    note: str = ""
    is_revoked: bool = False

    def info(self, machines: int = 0, token: str = "") -> TokenInfo:
        """What is shown of the token: `machines` that joined with it, and its pasted form `token` if it may be seen. The secret
        is left out."""
        return TokenInfo(
            id=self.id,
            right=self.right,
            created=self.created,
            note=self.note,
            is_revoked=self.is_revoked,
            machines=machines,
            token=token,
        )


class TokenBook:
    """The tokens of a run, in a file that only its owner may read. A new run has one token of each right."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._lock = threading.Lock()
        with disk_errors(folder, "start again."):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            self._tokens = self._read()
            for right in RIGHTS:
                if not any(token.right == right for token in self._tokens):
                    self._add(right, "made with the run")

    def _read(self) -> list[Token]:
        if not self.path.exists():
            return []
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=list[Token])
        except (msgspec.MsgspecError, OSError) as error:
            raise UserError(
                f"{self.path} cannot be read ({error}): restore it, or remove it: then new tokens are made, and the old are void."
            ) from error

    def _add(self, right: Right, note: str) -> Token:
        number = 1 + sum(token.right == right for token in self._tokens)
        today = datetime.now(UTC).strftime("%Y-%m-%d")
        token = Token(id=f"{right}-{number}", right=right, secret=secrets.token_urlsafe(32), created=today, note=note)
        self._write([*self._tokens, token])
        return token

    def _write(self, tokens: list[Token]) -> None:
        write_atomically(self.path, msgspec.json.format(msgspec.json.encode(tokens), indent=1), mode=0o600)
        self._tokens = tokens

    def find(self, secret: bytes) -> Token | None:
        """The valid token with this secret. It compares the digests of all tokens, so that timing reveals nothing."""
        digest = hashlib.sha256(secret).digest()
        tokens = [token for token in self._tokens if hashlib.sha256(token.secret.encode()).digest() == digest]
        return next((token for token in tokens if not token.is_revoked), None)

    def get(self, token_id: str) -> Token:
        """The token with this id, even if it was revoked. Raises Refused if there is none."""
        token = next((token for token in self._tokens if token.id == token_id), None)
        if token is None:
            raise Refused(RefusalCode.NO_SUCH, f"There is no token {token_id!r}: `heloco tokens` lists them.")
        return token

    def valid(self, right: Right) -> list[Token]:
        """Tokens with a right that are not revoked, oldest first."""
        return [token for token in self._tokens if token.right == right and not token.is_revoked]

    def first(self, right: Right) -> Token:
        """The oldest valid token with a right. Makes a new one if all were revoked."""
        with self._lock:
            valid = self.valid(right)
            return valid[0] if valid else self._add(right, "made because all others were revoked")

    def all(self) -> list[Token]:
        """All tokens, oldest first, the revoked ones included."""
        return list(self._tokens)

    def add(self, right: Right, note: str) -> Token:
        """Makes a token, writes it to the file and returns it. Raises Refused if the run has `TOKEN_LIMIT` tokens already."""
        with self._lock:
            if len(self._tokens) >= TOKEN_LIMIT:
                raise Refused(RefusalCode.BUSY, f"The run has {TOKEN_LIMIT} tokens already.")
            return self._add(right, note)

    def revoke(self, token_id: str) -> Token:
        """Marks a token as no longer valid and returns it as it was. Raises Refused if there is none, or if it is the last
        valid admin token."""
        with self._lock:
            token = self.get(token_id)
            if token.right == "admin" and self.valid("admin") == [token]:
                raise Refused(
                    RefusalCode.LAST_ADMIN, f"{token_id} is the last valid admin token: make another first (--new admin)."
                )
            self._write([replace(t, is_revoked=True) if t.id == token_id else t for t in self._tokens])
            return token

    def text(self, token: Token, fingerprint: str) -> str:
        """The token in the form that is pasted."""
        return format_token(token.right, token.secret, fingerprint)
