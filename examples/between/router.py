"""A router between SGLang and vLLM: one of them prefills a request, the other decodes it. OpenAI's completions.

    python router.py --prefill sglang=HOST:30000/8998 --decode vllm=HOST:8200
    python router.py --prefill vllm=HOST:8100 --decode sglang=HOST:31000 [--host ADDRESS]

``HOST:PORT/BOOTSTRAP`` of a prefill server of SGLang has its ``--port`` and its ``--disaggregation-bootstrap-port``.
Both servers run with the description ``common``. Decode answers the client.

* SGLang computes a prompt once decode has asked for its rows. So both servers are asked at once. SGLang's bootstrap
  server says where its ranks are, which vLLM learns from its parameters.
* vLLM's answer names the first token and its ranks. So decode is asked after it. SGLang asks a bootstrap server where
  the ranks are: the router is one, at a port for each prefill server. ``--host`` is its address for SGLang.

Needs aiohttp, FastAPI and uvicorn, which both engines bring.
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
from aiohttp import web
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

PATHS = ("/v1/completions", "/v1/chat/completions")
OURS = ("kv_transfer_params", "custom_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")
"""Keys that a client must not set."""


class RefusedError(Exception):
    """A request that the router does not serve."""


class Router:
    """Sends each request to the next prefill and the next decode server; each is ``ENGINE=HOST:PORT``."""

    def __init__(self, prefill: list[str], decode: list[str], host: str) -> None:
        engines = {one.partition("=")[0] for one in prefill}, {one.partition("=")[0] for one in decode}
        if engines not in (({"sglang"}, {"vllm"}), ({"vllm"}, {"sglang"})):
            raise SystemExit(f"between sglang and vllm, not {engines}: each engine has a router of its own")
        self._from_sglang = engines[0] == {"sglang"}
        self._prefill, self._decode = (itertools.cycle(one.partition("=")[2] for one in of) for of in (prefill, decode))
        self._host = host
        self._places: dict[str, int] = {}
        self._instances: dict[str, dict[str, Any]] = {}

    @cached_property
    def session(self) -> aiohttp.ClientSession:
        """One for all requests; made in the loop that uses it."""
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))

    async def ask(self, method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer, as JSON; an error if it is one."""
        async with self.session.request(method, url, json=body) as answer:
            if answer.status >= 400:
                raise RefusedError(f"{url}: status {answer.status}: {(await answer.text())[:500]}")
            found: dict[str, Any] = await answer.json(content_type=None)
            return found

    async def serve(self, path: str, body: dict[str, Any]) -> Response:
        """One request, in a room of its own: a request that is sent again takes another."""
        if body.get("n", 1) != 1:
            raise RefusedError("n: one choice for each request")
        body = {key: value for key, value in body.items() if key not in OURS}
        server, decode, room = next(self._prefill), f"http://{next(self._decode)}{path}", random.getrandbits(62) + 1
        if self._from_sglang:
            return await self.to_vllm(server, decode, path, body, room)
        return await self.answer(decode, body, await self.from_vllm(server, path, body, room))

    async def to_vllm(self, server: str, decode: str, path: str, body: dict[str, Any], room: int) -> Response:
        """SGLang prefills, vLLM decodes."""
        prefill, _, port = server.partition("/")
        host = prefill.rpartition(":")[0]
        where = await self.ask("GET", f"http://{host}:{port}/instance")
        params = {"do_remote_prefill": True, "transfer_id": f"sglang {room}", **where}
        asked = {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": room, "stream": False}
        asked = {key: value for key, value in body.items() if key != "stream_options"} | asked
        computed = asyncio.ensure_future(self.ask("POST", f"http://{prefill}{path}", asked))
        decoded = asyncio.ensure_future(self.answer(decode, body, {"kv_transfer_params": params}))
        await asyncio.wait((computed, decoded), return_when=asyncio.FIRST_COMPLETED)
        if computed.done() and (error := computed.exception()) is not None:
            decoded.cancel()  # it would wait for rows that never come
            raise error
        computed.add_done_callback(lambda done: done.cancelled() or done.exception())
        if decoded.exception() is not None or decoded.result().status_code >= 400 if decoded.done() else False:
            computed.cancel()  # prefill would keep its rows for a decode that never comes
        return await decoded

    async def from_vllm(self, server: str, path: str, body: dict[str, Any], room: int) -> dict[str, Any]:
        """VLLM prefills; what SGLang needs to decode."""
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"sglang {room}"}
        asked = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": params}
        for key in ("stream_options", "min_tokens"):
            asked.pop(key, None)
        if "max_completion_tokens" in asked:
            asked["max_completion_tokens"] = 1
        found = (await self.ask("POST", f"http://{server}{path}", asked)).get("kv_transfer_params")
        if found is None:
            raise RefusedError(f"{server} sends nothing of this prompt; its log says why")
        self._instances[server] = {key: found[key] for key in ("instance", "addresses")}
        if server not in self._places:
            self._places[server] = await self.place(server)
        return {
            "bootstrap_host": self._host,
            "bootstrap_port": self._places[server],
            "bootstrap_room": room,
            "custom_params": {"disagg_kv_first_token": found["first_token"]},
        }

    async def place(self, server: str) -> int:
        """The port of a bootstrap server for a prefill server of vLLM."""

        async def instance(_: web.Request) -> web.Response:
            return web.json_response(self._instances[server])

        app = web.Application()
        app.router.add_get("/instance", instance)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, self._host, 0).start()
        return int(runner.addresses[0][1])

    async def answer(self, url: str, body: dict[str, Any], params: dict[str, Any]) -> Response:
        """Decode's response, or its parts as they come."""
        answer = await self.session.post(url, json={**body, **params})
        if not body.get("stream"):
            async with answer:
                return JSONResponse(await answer.json(content_type=None), answer.status)

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
        except (aiohttp.ClientError, RefusedError) as exc:
            return JSONResponse({"error": {"message": str(exc), "type": type(exc).__name__}}, 502)

    for path in PATHS:
        app.post(path)(route)
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--prefill", nargs="+", required=True)
    parser.add_argument("--decode", nargs="+", required=True)
    given = parser.parse_args()
    uvicorn.run(application(Router(given.prefill, given.decode, given.host)), port=given.port)
