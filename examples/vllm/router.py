"""A router for prefill and decode instances of vLLM: OpenAI's completions, one instance of each kind a request.

    python router.py --prefill http://HOST:8100 --decode http://HOST:8200 [--after-prefill]

Both instances get a request at once, with the id of its transfer: decode takes its blocks while prefill computes.
Several routers may serve the same instances. A router needs what vLLM brings.

Rules:

* **Origin.** Decode has to know the instance behind a prefill server, and the addresses of its ranks. Each answer of
  prefill has them. Until a server's first answer, decode is asked once prefill has answered. So it is with
  ``--after-prefill``, and for a server whose answers alternate, since it has several data-parallel ranks.
* **Refusal.** A server refuses a request, for example because its prompt is too long. The other server's request is
  ended, and the client gets the refusal.
* **Failure.** A server cannot be reached, or answers 5xx. The other server's request is ended, and the origin of the
  prefill server is forgotten.
* **Restart.** Prefill's answer names another origin than decode was given. Decode's request is ended.
* **Second attempt.** After a failure or a restart a request begins anew, once: with the next servers, another transfer
  id, and decode after prefill. The client gets nothing before decode's first token, so it does not notice.
* **The client goes away.** Both requests are ended.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cached_property
from typing import Any

import aiohttp
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

log = logging.getLogger("uvicorn.error")

PATHS = ("/v1/completions", "/v1/chat/completions")
ATTEMPTS = 2
CLIENT_HAS_GONE = 499


class RefusedError(Exception):
    """A server refuses a request: the client gets that answer."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status} {body:.300}")
        self.response = Response(body, status, media_type="application/json")


class FailedError(RefusedError):
    """The same, but another attempt may succeed."""


class RestartedError(FailedError):
    """A prefill server has another origin than decode was given."""


class NotSentError(Exception):
    """Prefill sends nothing of this prompt: decode computes it."""


class Stream(StreamingResponse):
    """Decode's parts as they come. However it ends, so does decode's request."""

    def __init__(self, first: bytes, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer
        super().__init__(self._parts(first), answer.status, media_type="text/event-stream")

    async def _parts(self, first: bytes) -> AsyncIterator[bytes]:
        yield first
        async for part in self._answer.content.iter_any():
            yield part

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()


class Origins:
    """Which instance is behind each prefill server, and at which addresses, as its answers say."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}
        self._seen: dict[str, list[dict[str, Any]]] = {}
        self._several: set[str] = set()

    def of(self, server: str) -> dict[str, Any] | None:
        """None: it is not known, or the server has several."""
        return None if server in self._several else self._known.get(server)

    def learn(self, server: str, origin: dict[str, Any]) -> None:
        """A server has answered."""
        known, seen = self._known.get(server), self._seen.setdefault(server, [])
        if origin not in seen:
            seen.append(origin)
        elif known not in (None, origin) and server not in self._several:
            log.warning("%s has several data-parallel ranks: decode is asked once it has answered", server)
            self._several.add(server)
        self._known[server] = origin

    def forget(self, server: str) -> None:
        """Something has failed."""
        self._known.pop(server, None)


class Router:
    """Sends each request to the next prefill and the next decode server."""

    def __init__(self, prefill: Iterable[str], decode: Iterable[str], *, after_prefill: bool = False) -> None:
        self._prefill, self._decode = itertools.cycle(prefill), itertools.cycle(decode)
        self._after_prefill = after_prefill
        self._origins = Origins()

    @cached_property
    def session(self) -> aiohttp.ClientSession:
        """One for all requests; made in the loop that uses it."""
        unlimited = aiohttp.TCPConnector(limit=0)
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=unlimited)

    async def serve(self, path: str, body: dict[str, Any]) -> Response:
        """One request."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._attempt(path, body, after=self._after_prefill or attempt > 1)
            except FailedError as failed:
                log.warning("attempt %d of %d: %s", attempt, ATTEMPTS, failed)
                response = failed.response
            except RefusedError as refused:
                return refused.response
        return response

    async def _attempt(self, path: str, body: dict[str, Any], *, after: bool) -> Response:
        server, decode, transfer = next(self._prefill), next(self._decode), uuid.uuid4().hex
        origin = None if after else self._origins.of(server)
        try:
            if origin is not None:
                return await self._together(server, decode, path, body, {"transfer_id": transfer, **origin})
            return await self._decoded(decode, path, body, await self._computed(server, path, body, transfer))
        except NotSentError:
            return await self._decoded(decode, path, body)
        except RestartedError:
            raise
        except FailedError:
            self._origins.forget(server)
            raise

    async def _together(
        self, server: str, decode: str, path: str, body: dict[str, Any], origin: dict[str, Any]
    ) -> Response:
        params = {"do_remote_prefill": True, "do_remote_decode": False, **origin}
        try:
            async with asyncio.TaskGroup() as both:  # if one fails, or the client goes away, it cancels the other one
                computed = both.create_task(self._expected(server, path, body, origin))
                decoded = both.create_task(self._decoded(decode, path, body, params, computed))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return decoded.result()

    async def _expected(self, server: str, path: str, body: dict[str, Any], origin: dict[str, Any]) -> None:
        """Prefill computes a prompt whose rows decode awaits from an origin."""
        found = await self._computed(server, path, body, origin["transfer_id"])
        if origin_of(found) != origin_of(origin):
            raise RestartedError(502, error(f"{server} has restarted"))

    async def _computed(self, server: str, path: str, body: dict[str, Any], transfer: str) -> dict[str, Any]:
        """Prefill computes a prompt; returns what decode needs."""
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        asked = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": params}
        for key in ("stream_options", "min_tokens"):
            asked.pop(key, None)
        asked |= {key: 1 for key in ("n", "best_of", "max_completion_tokens") if key in asked}
        with reaching(server):
            async with await self._post(server + path, asked) as answer:
                found: dict[str, Any] | None = (await answer.json()).get("kv_transfer_params")
        if found is None:
            raise NotSentError
        self._origins.learn(server, origin_of(found))
        return found

    async def _decoded(
        self,
        server: str,
        path: str,
        body: dict[str, Any],
        params: dict[str, Any] | None = None,
        computed: Awaitable[None] | None = None,
    ) -> Response:
        """Decode's response, or a stream that has begun; not before prefill has answered."""
        asked = body if params is None else {**body, "kv_transfer_params": params}
        with reaching(server):
            answer = await self._post(server + path, asked)
            try:
                first = await (answer.content.readany() if body.get("stream") else answer.read())
                if first.startswith(b'data: {"error"'):
                    raise FailedError(500, first.decode().removeprefix("data: ").split("\n")[0])
                if computed is not None:
                    await computed
            except BaseException:
                answer.close()
                raise
        return Stream(first, answer) if body.get("stream") else Response(first, media_type=answer.content_type)

    async def _post(self, url: str, body: dict[str, Any]) -> aiohttp.ClientResponse:
        answer = await self.session.post(url, json=body)
        if answer.ok:
            return answer
        async with answer:
            kind = FailedError if answer.status >= 500 else RefusedError
            raise kind(answer.status, await answer.text())


def origin_of(found: dict[str, Any]) -> dict[str, Any]:
    """The part of prefill's answer that is the same for all requests."""
    return {key: found[key] for key in ("instance", "addresses")}


def error(message: str) -> str:
    """As OpenAI's API has it."""
    return json.dumps({"error": {"message": message, "type": "router_error", "code": 502}})


@contextmanager
def reaching(server: str) -> Iterator[None]:
    """A server that cannot be reached has failed."""
    try:
        yield
    except aiohttp.ClientError as exc:
        raise FailedError(502, error(f"{server}: {type(exc).__name__}: {exc}")) from exc


async def gone(request: Request) -> None:
    """Until the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def application(router: Router) -> FastAPI:
    """The HTTP server."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with router.session:
            yield

    app = FastAPI(lifespan=lifespan)

    async def route(request: Request, body: dict[str, Any]) -> Response:
        given = {key: value for key, value in body.items() if key != "kv_transfer_params"}
        served = asyncio.create_task(router.serve(request.url.path, given))
        left = asyncio.create_task(gone(request))
        try:
            await asyncio.wait((served, left), return_when=asyncio.FIRST_COMPLETED)
            return served.result() if served.done() else Response(status_code=CLIENT_HAS_GONE)
        finally:
            served.cancel()
            left.cancel()

    for path in PATHS:
        app.post(path)(route)
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1", help="address at which clients reach the router")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", nargs="+", required=True)
    parser.add_argument("--decode", nargs="+", required=True)
    parser.add_argument("--after-prefill", action="store_true", help="ask decode once prefill has answered")
    given = parser.parse_args()
    served = application(Router(given.prefill, given.decode, after_prefill=given.after_prefill))
    uvicorn.run(served, host=given.host, port=given.port)
