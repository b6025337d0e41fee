"""Answers in JSON, and refusals. An error in one request affects no other."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from heloco.cluster.gateway.auth import DISCARDED, TOKEN, unread
from heloco.cluster.protocol.messages import Right, encode
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.server.descriptors import has_run_out
from heloco.cluster.server.token_book import Token
from heloco.errors import RunStopped, UserError

Handler = Callable[[Request], Awaitable[Any]]
log = logging.getLogger("heloco.gateway")
RAN_OUT = "The gateway has no memory, file or thread left for this request at the moment: ask again."
STATUS = {
    RefusalCode.MALFORMED: 400, RefusalCode.SECRET: 401, RefusalCode.RIGHT: 403, RefusalCode.BARRED: 403,
    RefusalCode.PATH: 404, RefusalCode.UNKNOWN_MACHINE: 404, RefusalCode.NO_SUCH: 404, RefusalCode.METHOD: 405,
    RefusalCode.TIMEOUT: 408, RefusalCode.CUT: 408, RefusalCode.ENDED: 410, RefusalCode.LENGTH: 411,
    RefusalCode.TOO_LONG: 413, RefusalCode.TOO_LARGE: 413, RefusalCode.LAYOUT: 422, RefusalCode.CORRUPTED: 422,
    RefusalCode.NOT_FINITE: 422, RefusalCode.MODEL: 422, RefusalCode.RATE: 429, RefusalCode.INTERNAL: 500,
    RefusalCode.AWAY: 503, RefusalCode.SUSPENDED: 503, RefusalCode.BUSY: 503, RefusalCode.DISK: 507,
}  # fmt: skip
"""HTTP status of each refusal code. All other codes get 409: the request does not fit the run's state."""


def reply(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(content), status, {"cache-control": "no-store", **(headers or {})}, "application/json")


def refusal(request: Request, error: Refused) -> Response:
    headers = {"connection": "close"} if unread(request.scope) > DISCARDED else {}
    return reply(error.refusal, STATUS.get(error.code, 409), headers)


def guard_handler(handler: Handler, rights: tuple[Right, ...]) -> Handler:
    """A handler for tokens with one of the rights, which turns every error into a refusal."""

    async def endpoint(request: Request) -> Any:
        try:
            token: Token = request.scope[TOKEN]
            if token.right not in rights:
                raise Refused(RefusalCode.RIGHT, f"A {token.right}'s token does not allow this: it takes {' or '.join(rights)}.")
            return await handler(request)
        except Refused as error:
            return refusal(request, error)
        except (UserError, RunStopped) as error:
            return refusal(request, Refused(RefusalCode.FAILED, str(error)))
        except ClientDisconnect:
            return Response(status_code=408)
        except Exception as error:
            if has_run_out(error):
                return refusal(request, Refused(RefusalCode.BUSY, RAN_OUT))
            log.exception("%s %s", request.method, request.url.path)
            return refusal(
                request, Refused(RefusalCode.INTERNAL, "The gateway failed with an internal error; its log has the details.")
            )

    return endpoint


class OnePath(Route):
    """A route with exactly the given methods. Starlette would add HEAD to GET, and read files for nothing."""

    def __init__(self, path: str, endpoint: Handler, methods: list[str]) -> None:
        super().__init__(path, endpoint, methods=methods)
        self.methods = set(methods)
