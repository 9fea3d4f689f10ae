"""A router for prefill and decode servers of vLLM and SGLang: one of each kind a request. OpenAI's completions.

    python router.py --prefill vllm=HOST:8100 --decode vllm=HOST:8200 [--after-prefill] [--hold-s SECONDS]
    python router.py --prefill sglang=HOST:30000/8998 --decode sglang=HOST:31000
    python router.py --prefill sglang=HOST:30000/8998 --decode vllm=HOST:8200
    python router.py --prefill vllm=HOST:8100 --decode sglang=HOST:31000 [--host ADDRESS]

A server is ``ENGINE=HOST:PORT``. A prefill server of SGLang is ``sglang=HOST:PORT/BOOTSTRAP``, with its ``--port`` and
its ``--disaggregation-bootstrap-port``. Several routers may serve the same servers. SGLang's ``/generate`` works where
both servers are of SGLang. A router needs aiohttp, FastAPI and uvicorn, which each engine brings.

Both servers get a request at once: decode reserves memory while prefill computes. How decode finds the rows:

* **SGLang prefills.** The request has the place of prefill's bootstrap server and a room, a number of its own. Where
  vLLM decodes, the router asks that server for the instance and its addresses.
* **vLLM prefills, vLLM decodes.** Each answer of prefill has its origin: the instance, and the addresses of its ranks.
  Until a server's first answer, decode is asked once prefill has answered. So it is with ``--after-prefill``, and for
  a server whose answers alternate, since it has several data-parallel ranks.
* **vLLM prefills, SGLang decodes.** Decode is asked once prefill has answered: the answer has the first token. SGLang
  asks a bootstrap server for the addresses. The router has one, at ``--host`` and a port for each prefill server.

With ``--hold-s`` rows go **both ways** between servers of vLLM whose ``kv_role`` is ``kv_both``: decode holds the rows
of an answer, and the prefill server of the conversation's next turn loads those that it lacks. Requests with one
``prompt_cache_key`` are a conversation. vLLM says where the rows are in answers that are not streamed.

Rules:

* **Refusal.** A server refuses a request, for example because its prompt is too long. The other server's request is
  ended, and the client gets the refusal.
* **Failure.** A server cannot be reached, or answers 5xx. The other server's request is ended, and the origin of the
  prefill server is forgotten.
* **Restart.** The answer of a prefill server of vLLM names another origin than decode was given. Decode's request is
  ended.
* **Second attempt.** After a failure or a restart a request begins anew, once: with the next servers, in another room,
  and between servers of vLLM after prefill. The client gets nothing before decode's first token, so it does not notice.
* **The client goes away.** Both requests are ended.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import random
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import aiohttp
import uvicorn
from aiohttp import web
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

log = logging.getLogger("uvicorn.error")

PATHS = ("/v1/completions", "/v1/chat/completions", "/generate")
OURS = ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")
"""Keys that only the router sets: they name addresses to which a server connects."""

CONVERSATION = "prompt_cache_key"
"""OpenAI's name for what requests with a common beginning share."""

MOST_CONVERSATIONS = 1 << 16
NOTHING: Mapping[str, Any] = {}
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


@dataclass(frozen=True)
class Server:
    """A server of an engine.

    Args:
        engine: ``vllm`` or ``sglang``.
        url: of its HTTP server.
        bootstrap: port of the bootstrap server of a prefill server of SGLang; else 0.
    """

    engine: str
    url: str
    bootstrap: int = 0

    @classmethod
    def prefill(cls, text: str) -> Server:
        """A prefill server, as the command line has it."""
        engine, _, place = text.partition("=")
        scheme, found, rest = place.rpartition("://")
        place, _, port = rest.partition("/")
        if not place or (engine, port.isdigit()) not in (("vllm", False), ("sglang", True)):
            raise ValueError(f"{text!r} is neither vllm=HOST:PORT nor sglang=HOST:PORT/BOOTSTRAP")
        return cls(engine, f"{scheme if found else 'http'}://{place}", int(port or 0))

    @classmethod
    def decode(cls, text: str) -> Server:
        """A decode server, as the command line has it."""
        engine, _, place = text.partition("=")
        if not place or engine not in ("vllm", "sglang"):
            raise ValueError(f"{text!r} is neither vllm=HOST:PORT nor sglang=HOST:PORT")
        return cls(engine, place if "://" in place else f"http://{place}")

    @property
    def host(self) -> str:
        """Where it runs."""
        return self.url.partition("://")[2].rpartition(":")[0]


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
    """Which instance is behind each prefill server of vLLM, and at which addresses, as its answers say."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}
        self._seen: dict[str, list[dict[str, Any]]] = {}
        self._several: set[str] = set()

    def of(self, url: str) -> dict[str, Any] | None:
        """None: it is not known, or the server has several."""
        return None if url in self._several else self._known.get(url)

    def learn(self, url: str, origin: dict[str, Any]) -> None:
        """A server has answered."""
        known, seen = self._known.get(url), self._seen.setdefault(url, [])
        if origin not in seen:
            seen.append(origin)
        elif known not in (None, origin) and url not in self._several:
            log.warning("%s has several data-parallel ranks: decode is asked once it has answered", url)
            self._several.add(url)
        self._known[url] = origin

    def forget(self, url: str) -> None:
        """Something has failed."""
        self._known.pop(url, None)


class Turns:
    """The rows that decode holds of each conversation's last answer, as that answer says; each is given out once."""

    def __init__(self) -> None:
        self._last: dict[str, dict[str, Any]] = {}

    def take(self, conversation: Any) -> dict[str, Any]:
        """For the next prompt; empty: none are known."""
        return self._last.pop(conversation, {}) if isinstance(conversation, str) else {}

    def learn(self, conversation: str, response: Response) -> Response:
        """Decode has answered. The client's answer names no addresses."""
        answer = json.loads(bytes(response.body))
        found = answer.pop("kv_transfer_params", None)
        if found is not None and "earlier" in found:
            self._last.pop(conversation, None)
            self._last[conversation] = {"earlier": found["earlier"]}
            if len(self._last) > MOST_CONVERSATIONS:
                del self._last[next(iter(self._last))]
        return Response(json.dumps(answer), response.status_code, media_type=response.media_type)


class Places:
    """A bootstrap server for each prefill server of vLLM, which SGLang asks for the instance and its addresses."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._ports: dict[str, int] = {}
        self._origins: dict[str, dict[str, Any]] = {}
        self._open = AsyncExitStack()

    async def port(self, url: str, origin: dict[str, Any]) -> int:
        """Where SGLang finds this origin of a server."""
        self._origins[url] = origin
        if url not in self._ports:
            self._ports[url] = await self._listen(url)
        return self._ports[url]

    async def _listen(self, url: str) -> int:
        async def instance(_: web.Request) -> web.Response:
            return web.json_response(self._origins[url])

        app = web.Application()
        app.router.add_get("/instance", instance)
        runner = web.AppRunner(app)
        await runner.setup()
        self._open.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, self.host, 0).start()
        return int(runner.addresses[0][1])

    async def close(self) -> None:
        """End them."""
        await self._open.aclose()


class Router:
    """Sends each request to the next prefill and the next decode server."""

    def __init__(
        self,
        prefill: Iterable[str],
        decode: Iterable[str],
        *,
        after_prefill: bool = False,
        host: str = "127.0.0.1",
        hold_s: float = 0.0,
    ) -> None:
        self._prefill = itertools.cycle([Server.prefill(text) for text in prefill])
        self._decode = itertools.cycle([Server.decode(text) for text in decode])
        self._after_prefill, self._hold_s = after_prefill, hold_s
        self._origins, self._places, self._turns = Origins(), Places(host), Turns()
        self._computing: set[asyncio.Task[Any]] = set()

    @cached_property
    def session(self) -> aiohttp.ClientSession:
        """One for all requests; made in the loop that uses it."""
        unlimited = aiohttp.TCPConnector(limit=0)
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=unlimited)

    async def close(self) -> None:
        """Give back what the router has opened."""
        await self._places.close()
        await self.session.close()

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
        prefill, decode = next(self._prefill), next(self._decode)
        body = {key: value for key, value in body.items() if key not in OURS}
        if "sglang" in (prefill.engine, decode.engine):
            sampling = body.get("sampling_params")  # of SGLang's own API
            if body.get("n", 1) != 1 or (isinstance(sampling, dict) and sampling.get("n", 1) != 1):
                raise RefusedError(400, error("n: one choice for each request", 400))
        if prefill.engine != decode.engine:
            body.pop("custom_params", None)
        if prefill.engine == "sglang":
            return await self._from_sglang(prefill, decode, path, body)
        try:
            if decode.engine == "vllm":
                return await self._within_vllm(prefill, decode, path, body, after=after)
            return await self._from_vllm_to_sglang(prefill, decode, path, body)
        except RestartedError:
            raise
        except FailedError:
            self._origins.forget(prefill.url)
            raise

    async def _from_sglang(self, prefill: Server, decode: Server, path: str, body: dict[str, Any]) -> Response:
        """SGLang computes a prompt once decode has asked for its rows."""
        room = random.getrandbits(62) + 1
        place = {"bootstrap_host": prefill.host, "bootstrap_port": prefill.bootstrap, "bootstrap_room": room}
        given: dict[str, Any] = place
        if decode.engine == "vllm":
            url = f"http://{prefill.host}:{prefill.bootstrap}/instance"
            with reaching(url):
                async with await self._answer("GET", url) as answer:
                    origin = await answer.json(content_type=None)
            given = {"kv_transfer_params": {"do_remote_prefill": True, "transfer_id": f"sglang {room}", **origin}}
        asked = {**body, **place, "stream": False}
        asked.pop("stream_options", None)
        computed = asyncio.create_task(self._computed(prefill, path, asked))
        return await self._together(computed, self._decoded(decode, path, {**body, **given}))

    async def _within_vllm(
        self, prefill: Server, decode: Server, path: str, body: dict[str, Any], *, after: bool
    ) -> Response:
        """Both ways, if decode is to hold the rows of the answer or holds those of the one before."""
        conversation, prompt = body.get(CONVERSATION), body.get("prompt")
        several = isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt)
        if several or body.get("n", 1) != 1:  # one answer carries the reference, and one request can use it
            return await self._there(prefill, decode, path, body, {}, {}, after=after)
        earlier = self._turns.take(conversation)
        if not self._hold_s or not isinstance(conversation, str) or body.get("stream"):
            return await self._there(prefill, decode, path, body, earlier, {}, after=after)
        hold = {"hold_s": self._hold_s}
        return self._turns.learn(
            conversation, await self._there(prefill, decode, path, body, earlier, hold, after=after)
        )

    async def _there(
        self,
        prefill: Server,
        decode: Server,
        path: str,
        body: dict[str, Any],
        earlier: dict[str, Any],
        hold: dict[str, Any],
        *,
        after: bool,
    ) -> Response:
        """At once, if the origin is known; else decode after prefill."""
        transfer, origin = uuid.uuid4().hex, None if after else self._origins.of(prefill.url)
        try:
            if origin is None:
                params = await self._computed_by_vllm(prefill, path, body, transfer, earlier)
                return await self._decoded(decode, path, {**body, "kv_transfer_params": {**params, **hold}})
            params = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer, **origin, **hold}
            computed = asyncio.create_task(self._expected(prefill, path, body, params, earlier))
            return await self._together(
                computed, self._decoded(decode, path, {**body, "kv_transfer_params": params}, computed)
            )
        except NotSentError:
            return await self._decoded(decode, path, {**body, "kv_transfer_params": hold} if hold else body)

    async def _from_vllm_to_sglang(self, prefill: Server, decode: Server, path: str, body: dict[str, Any]) -> Response:
        """Decode after prefill, whose answer has the first token."""
        room = random.getrandbits(62) + 1
        try:
            found = await self._computed_by_vllm(prefill, path, body, f"sglang {room}")
        except NotSentError:
            message = f"{prefill.url} sends nothing of this prompt; its log says why"
            raise RefusedError(502, error(message)) from None
        given = {
            "bootstrap_host": self._places.host,
            "bootstrap_port": await self._places.port(prefill.url, origin_of(found)),
            "bootstrap_room": room,
            "custom_params": {"disagg_kv_first_token": found["first_token"]},
        }
        return await self._decoded(decode, path, {**body, **given})

    async def _together(self, computed: asyncio.Task[Any], response: Coroutine[Any, Any, Response]) -> Response:
        """Decode's response. If prefill or decode fails, or the client goes away, the requests of both are ended."""
        self._computing.add(computed)  # prefill may answer later than decode
        computed.add_done_callback(self._computing.discard)
        decoded = asyncio.create_task(response)
        for task in (computed, decoded):  # one error is enough
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.wait((computed, decoded), return_when=asyncio.FIRST_COMPLETED)
            if computed.done():
                computed.result()  # where it has failed, decode would wait for rows that never come
            return await decoded
        except BaseException:
            computed.cancel()  # prefill would keep its rows for a decode that never comes
            decoded.cancel()
            raise

    async def _expected(
        self, prefill: Server, path: str, body: dict[str, Any], params: dict[str, Any], earlier: dict[str, Any]
    ) -> None:
        """A prefill server of vLLM computes a prompt whose rows decode awaits from an origin."""
        found = await self._computed_by_vllm(prefill, path, body, params["transfer_id"], earlier)
        if origin_of(found) != origin_of(params):
            raise RestartedError(502, error(f"{prefill.url} has restarted"))

    async def _computed_by_vllm(
        self, prefill: Server, path: str, body: dict[str, Any], transfer: str, earlier: Mapping[str, Any] = NOTHING
    ) -> dict[str, Any]:
        """A prefill server of vLLM computes a prompt; returns what decode needs."""
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer, **earlier}
        asked = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": params}
        for key in ("stream_options", "min_tokens"):
            asked.pop(key, None)
        asked |= {key: 1 for key in ("n", "best_of", "max_completion_tokens") if key in asked}
        found: dict[str, Any] | None = (await self._computed(prefill, path, asked)).get("kv_transfer_params")
        if found is None:
            raise NotSentError
        self._origins.learn(prefill.url, origin_of(found))
        return found

    async def _computed(self, prefill: Server, path: str, asked: dict[str, Any]) -> Any:
        """Prefill's answer."""
        with reaching(prefill.url):
            async with await self._answer("POST", prefill.url + path, asked) as answer:
                return await answer.json()

    async def _decoded(
        self, decode: Server, path: str, asked: dict[str, Any], computed: asyncio.Task[None] | None = None
    ) -> Response:
        """Decode's response, or a stream that has begun; with ``computed`` not before that has ended."""
        with reaching(decode.url):
            answer = await self._answer("POST", decode.url + path, asked)
            try:
                first = await (answer.content.readany() if asked.get("stream") else answer.read())
                if first.startswith(b'data: {"error"'):
                    raise FailedError(500, first.decode().removeprefix("data: ").split("\n")[0])
                if computed is not None:
                    await computed
            except BaseException:
                answer.close()
                raise
        return Stream(first, answer) if asked.get("stream") else Response(first, media_type=answer.content_type)

    async def _answer(self, method: str, url: str, body: dict[str, Any] | None = None) -> aiohttp.ClientResponse:
        answer = await self.session.request(method, url, json=body)
        if answer.ok:
            return answer
        async with answer:
            kind = FailedError if answer.status >= 500 else RefusedError
            raise kind(answer.status, await answer.text())


def origin_of(found: dict[str, Any]) -> dict[str, Any]:
    """The part of the answer of vLLM's prefill that is the same for all requests."""
    return {key: found[key] for key in ("instance", "addresses")}


def error(message: str, code: int = 502) -> str:
    """As OpenAI's API has it."""
    return json.dumps({"error": {"message": message, "type": "router_error", "code": code}})


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """A server that cannot be reached has failed."""
    try:
        yield
    except aiohttp.ClientError as exc:
        raise FailedError(502, error(f"{url}: {type(exc).__name__}: {exc}")) from exc


async def gone(request: Request) -> None:
    """Until the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def application(router: Router) -> FastAPI:
    """The HTTP server."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await router.close()

    app = FastAPI(lifespan=lifespan)

    async def route(request: Request, body: dict[str, Any]) -> Response:
        served = asyncio.create_task(router.serve(request.url.path, body))
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
    parser.add_argument("--host", default="127.0.0.1", help="address at which clients and SGLang reach the router")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", nargs="+", required=True, metavar="SERVER")
    parser.add_argument("--decode", nargs="+", required=True, metavar="SERVER")
    parser.add_argument("--after-prefill", action="store_true", help="vLLM: ask decode once prefill has answered")
    parser.add_argument(
        "--hold-s", type=float, default=0.0, help="vLLM, kv_both: seconds for which decode holds answers"
    )
    given = parser.parse_args()
    try:
        router = Router(
            given.prefill, given.decode, after_prefill=given.after_prefill, host=given.host, hold_s=given.hold_s
        )
    except ValueError as exc:
        parser.error(str(exc))
    uvicorn.run(application(router), host=given.host, port=given.port)
