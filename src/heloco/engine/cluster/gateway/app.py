"""The gateway's paths, under /v1: each checks its message, asks the service and answers in JSON.

Whatever is refused is answered with {"denied": name, "sentence": why} and has changed nothing. Every request may be repeated.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from heloco.engine.cluster.descriptors import has_run_out
from heloco.engine.cluster.files import Denied, Incoming
from heloco.engine.cluster.gateway.admission import Admit
from heloco.engine.cluster.gateway.bodies import FileBody, Zeros, begin_of, discard, message, take_in
from heloco.engine.cluster.gateway.calls import ANSWER_S, Calls, Changes
from heloco.engine.cluster.gateway.checks import LARGE, SMALL, Fields
from heloco.engine.cluster.gateway.credentials import Credentials
from heloco.engine.cluster.gateway.guard import DISCARDED, PAGE, Buckets, Guard, unread
from heloco.engine.cluster.service import Service
from heloco.errors import RunStopped, UserError
from heloco.run.tensors import Layout

Handler = Callable[[Request], Awaitable[Any]]
log = logging.getLogger("heloco.gateway")
REQUESTS_PER_S, REQUESTS_AT_ONCE = 1000.0, 5000.0
"""Of one machine."""
JOINS_PER_S, JOINS_AT_ONCE = 10.0, 500.0
"""From one address: each leaves a line in the journal."""
PROBE = 1 << 26
RAN_OUT = "The gateway has no memory, file or thread left for this request at the moment: ask again."
STATUS = {
    "malformed": 400, "report": 400, "path": 404, "unknown-machine": 404, "method": 405, "timeout": 408, "cut": 408,
    "ended": 410, "length": 411, "too-long": 413, "layout": 422, "corrupted": 422, "not-finite": 422, "model": 422, "rate": 429,
    "internal": 500, "busy": 503, "disk": 507,
}  # fmt: skip
"""By the refusal's name; 409 for all others: the request does not fit the run's state."""


def reply(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return Response(text, status, {"cache-control": "no-store", **(headers or {})}, "application/json")


def refusal(request: Request, denied: Denied) -> Response:
    closing = {"connection": "close"} if unread(request.scope) > DISCARDED else {}
    about = {"denied": denied.name, "sentence": str(denied), **denied.about}
    return reply(about, STATUS.get(denied.name, 409), closing)


def guarded(handler: Handler) -> Handler:
    """No request ends anything but itself."""

    async def endpoint(request: Request) -> Any:
        try:
            return await handler(request)
        except Denied as denied:
            return refusal(request, denied)
        except (UserError, RunStopped) as error:
            return refusal(request, Denied("failed", str(error)))
        except ClientDisconnect:
            return Response(status_code=408)
        except Exception as error:
            if has_run_out(error):
                return refusal(request, Denied("busy", RAN_OUT))
            log.exception("%s %s", request.method, request.url.path)
            return refusal(request, Denied("internal", "The gateway met an error of its own; its log has the details."))

    return endpoint


class OnePath(Route):
    """Only what it says: Starlette adds HEAD to GET, which would read files for nothing."""

    def __init__(self, path: str, endpoint: Handler, methods: list[str]) -> None:
        super().__init__(path, endpoint, methods=methods)
        self.methods = set(methods)


class Gateway:
    """The paths over a service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.calls = Calls(service)
        self._changes: Changes | None = None
        self._requests = Buckets(REQUESTS_PER_S, REQUESTS_AT_ONCE)
        self._joins = Buckets(JOINS_PER_S, JOINS_AT_ONCE)
        self._models: dict[str, Layout] = {}
        """Of machines that are sending a model."""

    def routes(self) -> list[BaseRoute]:
        paths: dict[str, dict[str, Handler]] = {
            "/describe": {"GET": self.describe},
            "/join": {"POST": self.join},
            "/model": {"POST": self.begin_model, "PUT": self.put_model},
            "/model/commit": {"POST": self.commit_model},
            "/round": {"POST": self.round},
            "/start": {"GET": self.start},
            "/contribution": {"GET": self.received, "PUT": self.put_contribution},
            "/contribution/commit": {"POST": self.commit},
            "/beat": {"POST": self.beat},
            "/abandon": {"POST": self.abandon},
            "/leave": {"POST": self.leave},
            "/status": {"GET": self.status},
            "/file": {"GET": self.file},
            "/stop": {"POST": self.stop},
            "/clock": {"GET": self.clock},
            "/probe": {"GET": self.probe_down, "POST": self.probe_up},
        }
        return [
            OnePath(f"/v1{path}", guarded(handler), methods=[method])
            for path, handlers in paths.items()
            for method, handler in handlers.items()
        ]

    def open(self) -> None:
        """In the loop."""
        self._changes = Changes(self.service)

    def end_waiting(self) -> None:
        """So that no request holds up the end. In the loop."""
        if self._changes is not None:
            self._changes.end()

    def close(self) -> None:
        self.end_waiting()
        self.calls.close()

    # ---- what requests have in common

    async def _said(self, request: Request, most: int = SMALL) -> Fields:
        return await message(request, self.calls, most, SMALL)

    def _machine(self, request: Request, fields: Fields) -> str:
        """Who asks; it must mean this run, and not ask too often."""
        machine, run = str(fields.text("machine")), fields.text("run")
        asking = machine if machine in self.service.machines.present else _address(request)
        if not self._requests.take(asking):
            raise Denied("rate", f"{machine} asks more than {REQUESTS_PER_S:g} times a second: ask less often.")
        if run != self.service.run_id:
            raise Denied("other-run", f"here is run {self.service.run_id}, not {run}: join this one, or mend the address.")
        return machine

    def _moved(self, machine: str) -> Callable[[], None]:
        return lambda: self.service.moved(machine)

    # ---- coming and going

    async def describe(self, _: Request) -> Response:
        return reply(self.service.describe())

    async def join(self, request: Request) -> Response:
        said = await self._said(request, LARGE)
        name, returning = said.text("name", most=100), said.text("returning", most=100, default=None)
        pace_s, version = said.number("pace_s", least=1e-12, most=1e9, default=None), said.text("version", most=40)
        layout = said.layout("layout", default=None)
        said.end()
        if not self._joins.take(_address(request)):
            raise Denied("rate", "machines of this address join too often: wait a little.")
        options = {"returning": returning, "pace_s": pace_s, "version": version, "layout": layout}
        return reply(await self.calls.locked(self.service.join, name, **options))

    async def beat(self, request: Request) -> Response:
        said = await self._said(request)
        machine, steps = self._machine(request, said), said.whole("steps")
        pace_s = said.number("pace_s", least=1e-12, most=1e9, default=None)
        said.end()
        return reply(self.service.beat(machine, steps, pace_s))  # takes no lock, so it is answered at once, in the loop

    async def abandon(self, request: Request) -> Response:
        machine, reason = await self._with_reason(request)
        await self.calls.locked(self.service.abandon, machine, reason)
        return reply({})

    async def leave(self, request: Request) -> Response:
        machine, reason = await self._with_reason(request)
        await self.calls.locked(self.service.leave, machine, reason)
        return reply({})

    async def _with_reason(self, request: Request) -> tuple[str, str]:
        said = await self._said(request)
        machine, reason = self._machine(request, said), said.text("reason", least=0, most=500)
        said.end()
        return machine, reason

    async def status(self, _: Request) -> Response:
        return reply(await self.calls.locked(self.service.status))

    async def file(self, request: Request) -> Response:
        """More of the run's config, tape or evaluations, for who looks at it from elsewhere."""
        asked = Fields.of_query(request.scope["query_string"])
        name, offset = asked.text("name"), asked.whole("offset", most=1 << 43)  # more cannot be sought
        asked.end()
        found = await self.calls.on_file(self.service.read, name, offset)
        return Response(found, headers={"cache-control": "no-store"}, media_type="application/octet-stream")

    async def stop(self, request: Request) -> Response:
        said = await self._said(request)
        reason = said.text("reason", least=0, most=500)
        said.end()
        return await self._long(("stop",), None, self.service.stop, reason)

    async def _long(self, name: tuple[Any, ...], machine: str | None, function: Callable[..., Any], *arguments: Any) -> Response:
        answer = await self.calls.long(name, machine, lambda: {"done": function(*arguments)})
        return reply({"wait": "it is under way: ask again"}, 202) if answer is None else reply(answer)

    # ---- rounds

    async def round(self, request: Request) -> Response:
        """A round as soon as there is one, or why there was none; while it waits it holds no thread."""
        said = await self._said(request)
        machine, wait_s = self._machine(request, said), said.number("wait_s", least=0, most=3600)
        said.end()
        until = time.monotonic() + min(wait_s or 0.0, ANSWER_S)
        assert self._changes is not None
        while True:
            change = self._changes.next()
            try:
                answer = await self.calls.locked(self.service.next_round, machine)
            except Denied as denied:
                if denied.name != "busy":
                    raise
                answer = {"wait": "the synchronizer is busy"}
            left = until - time.monotonic()
            if "wait" not in answer or left <= 0 or self._changes.over:
                return reply(answer)
            await _set_within(change, left)

    async def start(self, request: Request) -> Any:
        asked = Fields.of_query(request.scope["query_string"])
        machine, key = self._machine(request, asked), asked.key()
        asked.end()
        path = await self.calls.locked(self.service.start, machine, key)
        size = self.service.starts.layout.size
        return await FileBody.of(self.calls, path, begin_of(request, size), size, self._moved(machine))

    # ---- contributions

    async def received(self, request: Request) -> Response:
        asked = Fields.of_query(request.scope["query_string"])
        machine, key = self._machine(request, asked), asked.key()
        asked.end()
        return reply(await self.calls.locked(self.service.received, machine, key))

    async def put_contribution(self, request: Request) -> Response:
        asked = Fields.of_query(request.scope["query_string"])
        machine, key, offset = self._machine(request, asked), asked.key(), asked.whole("offset")
        asked.end()
        incoming = await self.calls.locked(self.service.incoming, machine, key)
        return await self._take_in(request, machine, incoming, offset)

    async def _take_in(self, request: Request, machine: str, incoming: Incoming, offset: int) -> Response:
        return reply({"size": await take_in(request, self.calls, incoming, offset, self._moved(machine))})

    async def commit(self, request: Request) -> Response:
        said = await self._said(request)
        machine, key = self._machine(request, said), said.key()
        report: dict[str, Any] = {name: said.number(name, default=None) for name in ("loss", "last_loss")}
        report |= {name: said.whole(name) for name in ("samples", "units")} | {"digest": said.digest("digest")}
        said.end()
        return await self._long(("commit", machine, key), machine, self.service.commit, machine, key, report)

    # ---- a model from outside

    async def begin_model(self, request: Request) -> Response:
        said = await self._said(request, LARGE)
        machine, layout = self._machine(request, said), said.layout("layout")
        said.end()
        assert layout is not None
        incoming = await self.calls.locked(self.service.incoming_model, machine, layout)
        present = self.service.machines.present
        self._models = {name: kept for name, kept in self._models.items() if name in present} | {machine: layout}
        return reply({"size": incoming.size})

    async def put_model(self, request: Request) -> Response:
        asked = Fields.of_query(request.scope["query_string"])
        machine, offset = self._machine(request, asked), asked.whole("offset")
        asked.end()
        layout = self._models.get(machine)
        if layout is None:
            raise Denied("incomplete", "tell the model's layout first.", size=0)
        incoming = await self.calls.locked(self.service.incoming_model, machine, layout)
        return await self._take_in(request, machine, incoming, offset)

    async def commit_model(self, request: Request) -> Response:
        said = await self._said(request, LARGE)
        machine, names, digest = self._machine(request, said), said.texts("names", most=500), said.digest("digest")
        said.end()

        def commit() -> None:
            try:
                self.service.commit_model(machine, names, digest)
            except UserError as error:
                raise Denied("model", str(error)) from error

        return await self._long(("model", machine), machine, commit)

    # ---- for `heloco doctor`

    async def clock(self, _: Request) -> Response:
        return reply({"time_s": time.time()})

    async def probe_down(self, request: Request) -> Any:
        asked = Fields.of_query(request.scope["query_string"])
        size = asked.whole("bytes", most=PROBE)
        asked.end()
        return Zeros(size)

    async def probe_up(self, request: Request) -> Response:
        return reply({"bytes": await discard(request, PROBE)})


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def app(service: Service, credentials: Credentials, page: Any = None) -> Starlette:
    """`page`: an ASGI app that only shows the run; it is served under /page to whoever has the view key."""
    gateway = Gateway(service)

    async def no_such(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        name = "method" if status == 405 else "path"
        return refusal(request, Denied(name, f"there is no {request.method} of this path here."))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        gateway.open()
        try:
            if hasattr(page, "router"):  # a Starlette app: what it does in the background must begin and end too
                async with page.router.lifespan_context(page):
                    yield
            else:
                yield
        finally:
            gateway.close()

    routes = [*gateway.routes(), *([Mount(PAGE, page)] if page is not None else [])]
    made = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, credentials=credentials), Middleware(Admit)],
        exception_handlers={HTTPException: no_such},
        lifespan=lifespan,
    )
    made.router.redirect_slashes = False
    made.state.gateway = gateway
    return made
