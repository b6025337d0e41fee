"""Connections to the page's process over a socket in the file system.

httpcore's own backend for asyncio reads such sockets with callbacks that print a traceback if a read is cancelled just when
bytes come in. asyncio's streams do not."""

# ruff: noqa: ARG002 (the interface is httpcore's)

import asyncio
from collections.abc import Iterable
from typing import Any

import httpcore


def connection_pool(address: str) -> httpcore.AsyncConnectionPool:
    """One connection for each request. There is no limit to them: the gateway bounds how many look."""
    return httpcore.AsyncConnectionPool(
        uds=address, network_backend=_UnixSockets(), max_connections=None, max_keepalive_connections=0
    )


class _UnixSockets(httpcore.AsyncNetworkBackend):
    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        return _Stream(*await asyncio.open_unix_connection(path))


class _Stream(httpcore.AsyncNetworkStream):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return await self._reader.read(max_bytes)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._writer.write(buffer)
        await self._writer.drain()

    async def aclose(self) -> None:
        self._writer.close()
