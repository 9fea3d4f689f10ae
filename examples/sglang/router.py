"""A router for prefill and decode servers of SGLang: one of each kind a request, both asked at once.

    python router.py --prefill HOST:30000/8998 --decode HOST:30100

``HOST:PORT/BOOTSTRAP`` of a prefill server has its ``--port`` and its ``--disaggregation-bootstrap-port``. Decode
answers the client. Needs what SGLang brings.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from functools import cached_property
from typing import Any

import aiohttp
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")


class Router:
    """Sends each request to the next prefill and the next decode server."""

    def __init__(self, prefill: list[str], decode: list[str]) -> None:
        self._prefill, self._decode = itertools.cycle(prefill), itertools.cycle(decode)

    @cached_property
    def session(self) -> aiohttp.ClientSession:
        """One for all requests; made in the loop that uses it."""
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))

    async def prefill(self, url: str, body: dict[str, Any]) -> None:
        """Compute the prompt; the answer is decode's."""
        async with self.session.post(url, json={**body, "stream": False}) as answer:
            await answer.read()
            answer.raise_for_status()

    async def serve(self, path: str, body: dict[str, Any]) -> Response:
        """One request, in a room of its own: a request that is sent again takes another."""
        server, _, port = next(self._prefill).partition("/")
        decode = f"http://{next(self._decode)}{path}"
        room = random.getrandbits(62) + 1
        asked = {
            **body,
            "bootstrap_host": server.rpartition(":")[0],
            "bootstrap_port": int(port),
            "bootstrap_room": room,
        }
        computed = asyncio.ensure_future(self.prefill(f"http://{server}{path}", asked))
        decoded = asyncio.ensure_future(self.session.post(decode, json=asked))
        await asyncio.wait((computed, decoded), return_when=asyncio.FIRST_COMPLETED)
        if computed.done() and (error := computed.exception()) is not None:
            decoded.cancel()  # it would wait for rows that never come
            raise error
        computed.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            answer = await decoded
        except aiohttp.ClientError:
            computed.cancel()  # prefill would keep its rows for a decode that never comes
            raise
        if answer.status >= 400:
            computed.cancel()
        if not body.get("stream"):
            async with answer:
                return JSONResponse(await answer.json(), answer.status)

        async def stream() -> AsyncIterator[bytes]:
            async with answer:  # also where the client goes away
                async for part in answer.content.iter_any():
                    yield part

        return StreamingResponse(stream(), answer.status, media_type="text/event-stream")


def application(router: Router) -> FastAPI:
    """The HTTP server."""
    app = FastAPI()

    async def route(request: Request) -> Response:
        try:
            return await router.serve(request.url.path, await request.json())
        except aiohttp.ClientError as exc:
            return JSONResponse({"error": {"message": str(exc), "type": type(exc).__name__}}, 502)

    for path in PATHS:
        app.post(path)(route)
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", nargs="+", required=True)
    parser.add_argument("--decode", nargs="+", required=True)
    given = parser.parse_args()
    uvicorn.run(application(Router(given.prefill, given.decode)), port=given.port)
