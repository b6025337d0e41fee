"""The gateway's paths under /v1. Each checks its message, calls the service and answers in JSON.

A refused request has changed nothing, and every request may be repeated. A machine shows its ticket in the header
`heloco-machine` (ID SECRET) and names the run in `heloco-run`.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from heloco.cluster.gateway.answers import Handler, OnePath, guard_handler, reply
from heloco.cluster.gateway.auth import TOKEN, Buckets, header
from heloco.cluster.gateway.bodies import LARGE, SMALL, FileBody, Zeros, begin_of, discard, message, take_in
from heloco.cluster.gateway.calls import ANSWER_S, Calls, Changes
from heloco.cluster.protocol import messages as m
from heloco.cluster.protocol.messages import Right, RoundKey, Ticket
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.protocol.score_messages import EvaluationResult, ScoreReport
from heloco.cluster.server.process import RunHost
from heloco.cluster.server.token_book import Token
from heloco.cluster.server.transfers import Upload
from heloco.wire.layout import Layout

T = TypeVar("T")
REQUESTS_PER_S, REQUEST_BURST = 1000.0, 5000.0
"""Limits for the requests of one machine: per second, and at once."""
LOOKS_PER_S, LOOK_BURST = 50.0, 200.0
"""Limits for viewers' requests from one address."""
JOINS_PER_S, JOIN_BURST = 5.0, 256.0
REPORTS_PER_S, REPORT_BURST = 1.0, 60.0
"""Limits for joins from one address and for the scores that one machine reports. Each writes a line to the journal."""
PROBE_LIMIT_BYTES = 1 << 26
WORKER: tuple[Right, ...] = ("worker",)
LOOKING: tuple[Right, ...] = ("viewer", "admin")
ADMIN: tuple[Right, ...] = ("admin",)
ANYBODY: tuple[Right, ...] = ("worker", "viewer", "admin")


class Key(m.Message, frozen=True, kw_only=True):
    """A round in a query."""

    worker: m.Natural
    round: m.Natural
    version: m.Natural


class KeyAndOffset(Key, frozen=True, kw_only=True):
    """A round and a position in its file, in a query."""

    offset: m.Natural


class ArrivalQuery(m.Message, frozen=True, kw_only=True):
    """The number of an arrival, in a query: whose model is to be evaluated."""

    arrival: m.Natural


class Offset(m.Message, frozen=True, kw_only=True):
    """A position in the model's file, in a query."""

    offset: m.Natural


class FilePart(m.Message, frozen=True, kw_only=True):
    """One of the run's readable files and a position in it, in a query."""

    name: m.ShortText
    offset: m.Natural


class ProbeSize(m.Message, frozen=True, kw_only=True):
    """How many bytes a machine wants to receive to measure its connection, in a query."""

    bytes: m.Natural


class Api:
    """The HTTP paths of a served run."""

    def __init__(self, host: RunHost) -> None:
        self.host, self.service = host, host.service
        self.calls = Calls(host.service)
        self._changes: Changes | None = None
        self.requests_allowed = Buckets(REQUESTS_PER_S, REQUEST_BURST)
        self._looks = Buckets(LOOKS_PER_S, LOOK_BURST)
        self._joins = Buckets(JOINS_PER_S, JOIN_BURST)
        self._reports = Buckets(REPORTS_PER_S, REPORT_BURST)
        self._models: dict[str, Layout] = {}
        """Machine -> the layout of the model that it is sending."""

    def routes(self) -> list[BaseRoute]:
        paths: list[tuple[str, str, tuple[Right, ...], Handler]] = [
            ("GET", "/describe", ANYBODY, self.describe),
            ("POST", "/join", WORKER, self.join),
            ("POST", "/model", WORKER, self.begin_model),
            ("PUT", "/model", WORKER, self.put_model),
            ("POST", "/model/commit", WORKER, self.commit_model),
            ("POST", "/round", WORKER, self.round),
            ("GET", "/start", WORKER, self.start),
            ("GET", "/evaluation", WORKER, self.evaluated_model),
            ("POST", "/evaluation", WORKER, self.scores),
            ("POST", "/scores", WORKER, self.reported_scores),
            ("GET", "/final", WORKER, self.final),
            ("GET", "/contribution", WORKER, self.upload_state),
            ("PUT", "/contribution", WORKER, self.put_contribution),
            ("POST", "/contribution/commit", WORKER, self.commit),
            ("POST", "/beat", WORKER, self.beat),
            ("POST", "/abandon", WORKER, self.abandon),
            ("POST", "/leave", WORKER, self.leave),
            ("GET", "/status", LOOKING, self.status),
            ("GET", "/file", LOOKING, self.file),
            ("POST", "/stop", ADMIN, self.stop),
            ("POST", "/suspend", ADMIN, self.suspend),
            ("POST", "/pause", ADMIN, self.pause),
            ("POST", "/unpause", ADMIN, self.unpause),
            ("POST", "/evict", ADMIN, self.evict),
            ("GET", "/tokens", ADMIN, self.tokens),
            ("POST", "/tokens", ADMIN, self.new_token),
            ("POST", "/tokens/revoke", ADMIN, self.revoke_token),
            ("GET", "/clock", ANYBODY, self.clock),
            ("GET", "/probe", ANYBODY, self.probe_down),
            ("POST", "/probe", ANYBODY, self.probe_up),
        ]
        return [OnePath(f"/v1{path}", guard_handler(handler, rights), [method]) for method, path, rights, handler in paths]

    def open(self) -> None:
        """Called in the loop before the first request."""
        self._changes = Changes(self.service)

    def end_waiting(self) -> None:
        """Ends requests that wait for a round, so that the server can stop. Called in the loop."""
        if self._changes is not None:
            self._changes.end()

    def close(self) -> None:
        self.end_waiting()
        self.calls.close()

    # ---- what requests have in common

    async def _body(self, request: Request, kind: type[T], limit: int = SMALL) -> T:
        return await message(request, self.calls, kind, limit)

    def _ticket(self, request: Request) -> Ticket:
        """The ticket of a request. Raises `Refused` if it names another run, is wrong, or comes too often."""
        ticket = shown_ticket(request)
        if ticket is None:
            raise Refused(RefusalCode.SECRET, "The request has no ticket in the header heloco-machine.")
        is_here = ticket.machine in self.service.state.roster.present
        self._limit(self.requests_allowed, ticket.machine if is_here else _address(request))
        named_run, served_run = header(request.scope, b"heloco-run").decode("latin-1"), self.service.state.run_id
        if named_run != served_run:
            raise Refused(RefusalCode.OTHER_RUN, f"This is run {served_run}, not {named_run}: join this one, or fix the address.")
        self.service.state.machine(ticket)
        return ticket

    def _limit(self, buckets: Buckets, name: str) -> None:
        if not buckets.take(name):
            raise Refused(RefusalCode.RATE, f"More than {buckets.per_s:g} requests per second come from you: ask less often.")

    def _query(self, request: Request, kind: type[T]) -> T:
        try:
            text = request.scope["query_string"].decode("ascii")
            pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=True, max_num_fields=16) if text else []
        except ValueError:
            raise Refused(RefusalCode.MALFORMED, "The query is not name=value&….") from None
        if len(dict(pairs)) != len(pairs):
            raise Refused(RefusalCode.MALFORMED, "The query has a name twice.")
        return m.convert(dict(pairs), kind)

    def _transfer_callback(self, ticket: Ticket) -> Callable[[], None]:
        return lambda: self.service.state.note_transfer(ticket.machine)

    async def _long(self, name: tuple[Any, ...], machine: str | None, function: Callable[..., Any], *arguments: Any) -> Response:
        """Calls a slow function. If it takes too long, the answer is 202, and a repeated request waits for the same call."""
        answer = await self.calls.call_long(name, machine, lambda: (function(*arguments),))
        return reply(m.Done(), 202) if answer is None else reply(answer[0] if answer[0] is not None else m.Done())

    # ---- coming and going

    async def describe(self, request: Request) -> Response:
        self._limit(self._looks, _address(request))
        return reply(self.service.describe())

    async def join(self, request: Request) -> Response:
        body = await self._body(request, m.JoinRequest, LARGE)
        self._limit(self._joins, _address(request))
        if body.layout is not None:
            checked_layout(body.layout)
        token: Token = request.scope[TOKEN]
        return reply(await self.calls.call_locked(self.service.members.join, body, shown_ticket(request), token.id))

    async def beat(self, request: Request) -> Response:
        ticket, beat = self._ticket(request), await self._body(request, m.Beat)
        return reply(self.service.members.beat(ticket, beat.steps))  # it takes no lock, so it needs no thread

    async def abandon(self, request: Request) -> Response:
        ticket, reason = self._ticket(request), await self._body(request, m.Reason)
        await self.calls.call_locked(self.service.rounds.abandon, ticket, m.printable(reason.text))
        return reply(m.Done())

    async def leave(self, request: Request) -> Response:
        ticket, reason = self._ticket(request), await self._body(request, m.Reason)
        await self.calls.call_locked(self.service.members.leave, ticket, m.printable(reason.text))
        return reply(m.Done())

    # ---- looking

    async def status(self, request: Request) -> Response:
        self._limit(self._looks, _address(request))
        token, admin = request.scope[TOKEN], self.service.admin
        # An administrator waits for the lock, and so sees the effect of an order that was given just before.
        waits = token.right == "admin" or admin.recent_status is None
        return reply(await (self.calls.call_locked if waits else self.calls.call_quick)(admin.status))

    async def file(self, request: Request) -> Response:
        """The next part of the run's config, tape, evaluations or journal, for a viewer on another machine."""
        part = self._query(request, FilePart)
        content = await self.calls.call_on_file(self.service.admin.read, part.name, part.offset)
        return Response(content, headers={"cache-control": "no-store"}, media_type="application/octet-stream")

    # ---- controlling

    async def _reason(self, request: Request) -> str:
        return m.printable((await self._body(request, m.Reason)).text)

    async def stop(self, request: Request) -> Response:
        return await self._long(("stop",), None, self.service.admin.stop, await self._reason(request))

    async def suspend(self, request: Request) -> Response:
        return await self._long(("suspend",), None, self.service.admin.suspend, await self._reason(request))

    async def pause(self, request: Request) -> Response:
        await self.calls.call_locked(self.service.pauses.pause, await self._reason(request))
        return reply(m.Done())

    async def unpause(self, _: Request) -> Response:
        await self.calls.call_locked(self.service.pauses.unpause)
        return reply(m.Done())

    async def evict(self, request: Request) -> Response:
        body = await self._body(request, m.MachineId)
        await self.calls.call_locked(self.service.members.evict, body.machine, m.printable(body.text))
        return reply(m.Done())

    async def tokens(self, _: Request) -> Response:
        return reply(await self.calls.call_locked(self.host.list_tokens))

    async def new_token(self, request: Request) -> Response:
        body = await self._body(request, m.TokenRequest)
        return reply(await self.calls.call_locked(self.host.new_token, body.right, m.printable(body.note)))

    async def revoke_token(self, request: Request) -> Response:
        body = await self._body(request, m.TokenId)
        await self.calls.call_locked(self.host.revoke_token, body.id)
        return reply(m.Done())

    # ---- rounds

    async def round(self, request: Request) -> Response:
        """A round as soon as one is free, or the reason why there is none. A waiting request holds no thread."""
        ticket, body = self._ticket(request), await self._body(request, m.RoundRequest)
        until = time.monotonic() + min(body.wait_s, ANSWER_S)
        assert self._changes is not None
        while True:
            change = self._changes.next()
            try:
                answer = await self.calls.call_locked(self.service.next, ticket, body.evaluates)
            except Refused as error:
                if error.code is not RefusalCode.BUSY:
                    raise
                answer = m.Wait(kind="busy", text="the synchronizer is busy")
            left_s = until - time.monotonic()
            if not isinstance(answer, m.Wait) or left_s <= 0 or self._changes.is_over:
                return reply(answer)
            await _set_within(change, min(left_s, answer.ask_again_s))

    async def start(self, request: Request) -> Any:
        ticket, key = self._ticket(request), self._query(request, Key)
        path = await self.calls.call_locked(self.service.rounds.start, ticket, RoundKey(key.worker, key.round, key.version))
        return await self._file_body(request, ticket, path)

    async def evaluated_model(self, request: Request) -> Any:
        ticket, query = self._ticket(request), self._query(request, ArrivalQuery)
        path = await self.calls.call_locked(self.service.evaluation.model, ticket, query.arrival)
        return await self._file_body(request, ticket, path)

    async def scores(self, request: Request) -> Response:
        ticket, result = self._ticket(request), await self._body(request, EvaluationResult, LARGE)
        await self.calls.call_locked(self.service.evaluation.take_in, ticket, result)
        return reply(m.Done())

    async def reported_scores(self, request: Request) -> Response:
        ticket, report = self._ticket(request), await self._body(request, ScoreReport)
        self._limit(self._reports, ticket.machine)
        await self.calls.call_locked(self.service.evaluation.take_report, ticket, report)
        return reply(m.Done())

    async def final(self, request: Request) -> Any:
        ticket = self._ticket(request)
        path = await self.calls.call_long(("final", ticket.machine), ticket.machine, self.service.rounds.final, ticket)
        if path is None:
            raise Refused(RefusalCode.BUSY, "The final model is being written: ask again.")
        return await self._file_body(request, ticket, path)

    async def _file_body(self, request: Request, ticket: Ticket, path: Any) -> Any:
        assert self.service.state.starts is not None
        size = self.service.state.starts.layout.size
        return await FileBody.open(self.calls, path, begin_of(request, size), size, self._transfer_callback(ticket))

    # ---- contributions

    async def upload_state(self, request: Request) -> Response:
        ticket, key = self._ticket(request), self._query(request, Key)
        round_key = RoundKey(key.worker, key.round, key.version)
        return reply(await self.calls.call_locked(self.service.contributions.progress, ticket, round_key))

    async def put_contribution(self, request: Request) -> Response:
        ticket, query = self._ticket(request), self._query(request, KeyAndOffset)
        key = RoundKey(query.worker, query.round, query.version)
        upload = await self.calls.call_locked(self.service.contributions.upload, ticket, key)
        return await self._take_in(request, ticket, upload, query.offset)

    async def _take_in(self, request: Request, ticket: Ticket, upload: Upload, offset: int) -> Response:
        return reply(m.UploadState(size=await take_in(request, self.calls, upload, offset, self._transfer_callback(ticket))))

    async def commit(self, request: Request) -> Response:
        ticket, body = self._ticket(request), await self._body(request, m.ContributionCommit)
        key = RoundKey(body.worker, body.round, body.version)
        name = ("commit", ticket.machine, key)
        return await self._long(name, ticket.machine, self.service.contributions.commit, ticket, key, body.digest, body)

    # ---- the model of an external run

    async def begin_model(self, request: Request) -> Response:
        ticket, offer = self._ticket(request), await self._body(request, m.ModelOffer, LARGE)
        layout = checked_layout(offer.layout)
        upload = await self.calls.call_locked(self.service.models.upload, ticket, layout)
        present = self.service.state.roster.present
        self._models = {name: each for name, each in self._models.items() if name in present} | {ticket.machine: layout}
        return reply(m.UploadState(size=upload.size))

    async def put_model(self, request: Request) -> Response:
        ticket, query = self._ticket(request), self._query(request, Offset)
        layout = self._models.get(ticket.machine)
        if layout is None:
            raise Refused(RefusalCode.INCOMPLETE, "Send the model's layout first.", size=0)
        upload = await self.calls.call_locked(self.service.models.upload, ticket, layout)
        return await self._take_in(request, ticket, upload, query.offset)

    async def commit_model(self, request: Request) -> Response:
        ticket, commit = self._ticket(request), await self._body(request, m.ModelCommit, LARGE)
        return await self._long(("model", ticket.machine), ticket.machine, self.service.models.commit, ticket, commit)

    # ---- for `heloco doctor`

    async def clock(self, request: Request) -> Response:
        self._limit(self._looks, _address(request))
        return reply({"time_s": time.time()})

    async def probe_down(self, request: Request) -> Any:
        self._limit(self._looks, _address(request))
        query = self._query(request, ProbeSize)
        if query.bytes > PROBE_LIMIT_BYTES:
            raise Refused(RefusalCode.MALFORMED, f"At most {PROBE_LIMIT_BYTES} bytes are sent.")
        return Zeros(query.bytes)

    async def probe_up(self, request: Request) -> Response:
        self._limit(self._looks, _address(request))
        return reply({"bytes": await discard(request, PROBE_LIMIT_BYTES)})


def shown_ticket(request: Request) -> Ticket | None:
    machine, _, secret = header(request.scope, b"heloco-machine").decode("utf-8", "replace").partition(" ")
    return Ticket(machine=machine[:200], secret=secret[:200]) if machine else None


def checked_layout(entries: m.Entries) -> Layout:
    try:
        return Layout.from_json(entries)
    except ValueError as error:
        raise Refused(RefusalCode.MALFORMED, f"The layout is malformed: {error}") from None


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
