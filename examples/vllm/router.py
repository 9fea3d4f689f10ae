"""A router for prefill and decode instances of vLLM: OpenAI's completions, one instance of each kind a request.

    python router.py --prefill http://HOST:8100 --decode http://HOST:8200 [--together]

Usually decode is asked once prefill has answered. With ``--together`` both are asked at once: the router names the
transfer, and decode gets its blocks while prefill still computes, so that layers cross meanwhile. Needs what vLLM
brings.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator
from functools import cached_property
from typing import Any

import aiohttp
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

PATHS = ("/v1/completions", "/v1/chat/completions")


class Router:
    """Sends each request to the next prefill and the next decode instance."""

    def __init__(self, prefill: list[str], decode: list[str], together: bool) -> None:
        self._prefill, self._decode = itertools.cycle(prefill), itertools.cycle(decode)
        self._together = together
        self._origins: dict[str, dict[str, Any]] = {}

    @cached_property
    def session(self) -> aiohttp.ClientSession:
        """One for all requests; made in the loop that uses it."""
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))

    async def prefill(self, server: str, path: str, body: dict[str, Any], transfer: str) -> dict[str, Any]:
        """Compute the prompt; returns what decode needs."""
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        asked = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": params}
        for key in ("stream_options", "min_tokens"):
            asked.pop(key, None)
        asked |= {key: 1 for key in ("n", "best_of", "max_completion_tokens") if key in asked}
        async with self.session.post(server + path, json=asked) as answer:
            answer.raise_for_status()
            found: dict[str, Any] | None = (await answer.json()).get("kv_transfer_params")
        if found is None:
            return {}  # prefill sends nothing of this prompt: decode computes it
        self._origins[server] = {key: found[key] for key in ("instance", "addresses")}
        return found

    async def serve(self, path: str, body: dict[str, Any]) -> Response:
        """One request."""
        server, decode, transfer = next(self._prefill), next(self._decode), uuid.uuid4().hex
        if self._together and server in self._origins:
            params = {"do_remote_prefill": True, "transfer_id": transfer, **self._origins[server]}
            computed = asyncio.ensure_future(self.prefill(server, path, body, transfer))
            decoded = asyncio.ensure_future(self.decode(decode, path, body, params))
            await asyncio.wait((computed, decoded), return_when=asyncio.FIRST_COMPLETED)
            if computed.done() and (error := computed.exception()) is not None:
                decoded.cancel()  # it would wait for rows that never come
                raise error
            computed.add_done_callback(lambda done: done.cancelled() or done.exception())
            return await decoded
        return await self.decode(decode, path, body, await self.prefill(server, path, body, transfer))

    async def decode(self, server: str, path: str, body: dict[str, Any], params: dict[str, Any]) -> Response:
        """The response, or its parts as they come."""
        asked = {**body, "kv_transfer_params": params} if params else body
        answer = await self.session.post(server + path, json=asked)
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
        body = {key: value for key, value in (await request.json()).items() if key != "kv_transfer_params"}
        try:
            return await router.serve(request.url.path, body)
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
    parser.add_argument("--together", action="store_true")
    given = parser.parse_args()
    uvicorn.run(application(Router(given.prefill, given.decode, given.together)), port=given.port)
