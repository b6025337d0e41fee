"""Answers in JSON, and refusals. An error in one request affects no other."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from heloco.cluster.gateway.auth import DISCARDED, TOKEN, unread
from heloco.cluster.protocol.messages import Right, encode
from heloco.cluster.protocol.refusals import Code, Refused
from heloco.cluster.server.descriptors import has_run_out
from heloco.cluster.server.token_book import Token
from heloco.errors import RunStopped, UserError

Handler = Callable[[Request], Awaitable[Any]]
log = logging.getLogger("heloco.gateway")
RAN_OUT = "The gateway has no memory, file or thread left for this request at the moment: ask again."
STATUS = {
    Code.MALFORMED: 400, Code.SECRET: 401, Code.RIGHT: 403, Code.BARRED: 403, Code.PATH: 404, Code.UNKNOWN_MACHINE: 404,
    Code.NO_SUCH: 404, Code.METHOD: 405, Code.TIMEOUT: 408, Code.CUT: 408, Code.ENDED: 410, Code.LENGTH: 411, Code.TOO_LONG: 413,
    Code.TOO_LARGE: 413, Code.LAYOUT: 422, Code.CORRUPTED: 422, Code.NOT_FINITE: 422, Code.MODEL: 422, Code.RATE: 429,
    Code.INTERNAL: 500, Code.AWAY: 503, Code.BUSY: 503, Code.DISK: 507,
}  # fmt: skip
"""HTTP status of each refusal code. All other codes get 409: the request does not fit the run's state."""


class RefusalBody(Struct, omit_defaults=True):
    """The JSON body of a refused request."""

    code: str
    text: str
    size: int | None = None


def reply(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(content), status, {"cache-control": "no-store", **(headers or {})}, "application/json")


def refusal(request: Request, refused: Refused) -> Response:
    closing = {"connection": "close"} if unread(request.scope) > DISCARDED else {}
    return reply(RefusalBody(refused.code, refused.text, refused.size), STATUS.get(refused.code, 409), closing)


def guarded(handler: Handler, rights: tuple[Right, ...]) -> Handler:
    """A handler for tokens with one of the rights, which turns every error into a refusal."""

    async def endpoint(request: Request) -> Any:
        try:
            token: Token = request.scope[TOKEN]
            if token.right not in rights:
                raise Refused(Code.RIGHT, f"A {token.right}'s token does not allow this: it takes {' or '.join(rights)}.")
            return await handler(request)
        except Refused as refused:
            return refusal(request, refused)
        except (UserError, RunStopped) as error:
            return refusal(request, Refused(Code.FAILED, str(error)))
        except ClientDisconnect:
            return Response(status_code=408)
        except Exception as error:
            if has_run_out(error):
                return refusal(request, Refused(Code.BUSY, RAN_OUT))
            log.exception("%s %s", request.method, request.url.path)
            return refusal(request, Refused(Code.INTERNAL, "The gateway failed with an internal error; its log has the details."))

    return endpoint


class OnePath(Route):
    """A route with exactly the given methods. Starlette would add HEAD to GET, and read files for nothing."""

    def __init__(self, path: str, endpoint: Handler, methods: list[str]) -> None:
        super().__init__(path, endpoint, methods=methods)
        self.methods = set(methods)
