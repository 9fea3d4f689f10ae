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
        self._session: aiohttp.ClientSession | None = None

    def session(self) -> aiohttp.ClientSession:
        """One for all requests; made in the loop that uses it."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        return self._session

    async def prefill(self, server: str, path: str, body: dict[str, Any], transfer: str) -> dict[str, Any]:
        """Compute the prompt; returns what decode needs."""
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        asked = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": params}
        asked.pop("stream_options", None)
        if "max_completion_tokens" in asked:
            asked["max_completion_tokens"] = 1
        async with self.session().post(server + path, json=asked) as answer:
            answer.raise_for_status()
            found: dict[str, Any] = (await answer.json())["kv_transfer_params"]
        self._origins[server] = {key: found[key] for key in ("instance", "addresses")}
        return found

    async def serve(self, path: str, body: dict[str, Any]) -> Response:
        """One request."""
        server, decode, transfer = next(self._prefill), next(self._decode), uuid.uuid4().hex
        if self._together and server in self._origins:
            background = asyncio.ensure_future(self.prefill(server, path, body, transfer))
            background.add_done_callback(lambda done: done.cancelled() or done.exception())
            params = {"do_remote_prefill": True, "transfer_id": transfer, **self._origins[server]}
        else:
            params = await self.prefill(server, path, body, transfer)
        answer = await self.session().post(decode + path, json={**body, "kv_transfer_params": params})
        if not body.get("stream"):
            return JSONResponse(await answer.json(), answer.status)

        async def stream() -> AsyncIterator[bytes]:
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
    parser.add_argument("--together", action="store_true")
    given = parser.parse_args()
    uvicorn.run(application(Router(given.prefill, given.decode, given.together)), port=given.port)
