"""The gateway as an ASGI app: authentication, the paths, and the live page."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount

from heloco.cluster.gateway.admission import Admit
from heloco.cluster.gateway.answers import refusal
from heloco.cluster.gateway.api import Api
from heloco.cluster.gateway.auth import PAGE, Auth
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.server.process import RunHost


def app(host: RunHost, page: Any = None) -> Starlette:
    """The gateway's app for a run. `page` is an ASGI app that shows the run. It is served under /page to holders of a viewer
    token, and its `close` is called at the end if it has one."""
    api = Api(host)

    async def no_such(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        code = RefusalCode.METHOD if status == 405 else RefusalCode.PATH
        return refusal(request, Refused(code, f"There is no {request.method} of this path here."))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        api.open()
        try:
            yield
        finally:
            if hasattr(page, "close"):
                page.close()
            api.close()

    assert host.tokens is not None
    application = Starlette(
        routes=[*api.routes(), *([Mount(PAGE, page)] if page is not None else [])],
        middleware=[Middleware(Auth, tokens=host.tokens), Middleware(Admit)],
        exception_handlers={HTTPException: no_such},
        lifespan=lifespan,
    )
    application.router.redirect_slashes = False
    application.state.api = api
    return application
