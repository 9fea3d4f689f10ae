"""The router's rules, over HTTP, between servers of either engine that answer as a test says."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
import uvicorn
from aiohttp import web
from attrs import define, field

from .instances import ROOT

spec = importlib.util.spec_from_file_location("example_router", ROOT / "examples" / "router.py")
assert spec is not None
assert spec.loader is not None
router = sys.modules["example_router"] = importlib.util.module_from_spec(spec)  # dataclasses look it up
spec.loader.exec_module(router)

pytestmark = pytest.mark.timeout(60)

Answer = Callable[[dict[str, Any]], Awaitable[web.StreamResponse]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
GONE = "vllm=127.0.0.1:9"
"""Where nothing listens."""

INSTANCE = {"instance": "S", "addresses": ["unix:///s"]}
"""What a bootstrap server of SGLang says."""


@define(eq=False)
class Server:
    """A server of either engine. ``answer`` of a request's body; ``ended``: requests whose client went away first."""

    answer: Answer
    asked: list[dict[str, Any]] = field(factory=list)
    ended: list[dict[str, Any]] = field(factory=list)
    change: asyncio.Condition = field(factory=asyncio.Condition)
    place: str = ""

    @property
    def vllm(self) -> str:
        """Its name for the router, as one of vLLM's."""
        return f"vllm={self.place}"

    @property
    def sglang(self) -> str:
        """As a decode server of SGLang."""
        return f"sglang={self.place}"

    @property
    def first(self) -> str:
        """As a prefill server of SGLang, with a bootstrap server at the same port."""
        return f"sglang={self.place}/{self.place.rpartition(':')[2]}"

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """A request."""
        body = await request.json()
        await self._note(self.asked, body)
        try:
            return await self.answer(body)
        except asyncio.CancelledError:
            await self._note(self.ended, body)
            raise

    async def _note(self, where: list[dict[str, Any]], body: dict[str, Any]) -> None:
        async with self.change:
            where.append(body)
            self.change.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Once it is so."""
        async with self.change:
            await self.change.wait_for(condition)

    @property
    def params(self) -> list[dict[str, Any]]:
        """What the requests had."""
        return [one.get("kv_transfer_params", {}) for one in self.asked]


def computes(
    instance: str = "P", after: Callable[[], Awaitable[None]] | None = None, addresses: str = "unix:///p"
) -> Answer:
    """A prefill server: its answer names the instance."""

    async def answer(body: dict[str, Any]) -> web.StreamResponse:
        if after is not None:
            await after()
        transfer = body["kv_transfer_params"]["transfer_id"]
        found = {"do_remote_prefill": True, "transfer_id": transfer, "instance": instance, "addresses": [addresses]}
        return web.json_response({"kv_transfer_params": {**found, "first_token": 7}})

    return answer


def decodes(after: Callable[[], Awaitable[None]] | None = None) -> Answer:
    """A decode server."""

    async def answer(body: dict[str, Any]) -> web.StreamResponse:
        if after is not None:
            await after()
        return web.json_response({"choices": [{"text": "decoded"}]})

    return answer


def fails(status: int, message: str) -> Answer:
    async def answer(body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": message}}, status=status)

    return answer


def in_turn(*answers: Answer) -> Answer:
    """One for each request; the last for all further ones."""
    left = list(answers)

    async def answer(body: dict[str, Any]) -> web.StreamResponse:
        return await (left.pop(0) if len(left) > 1 else left[0])(body)

    return answer


async def never() -> None:
    """As long as the client waits."""
    await asyncio.Event().wait()


class World:
    """A router between prefill and decode servers, and a client."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.session: aiohttp.ClientSession

    async def server(self, answer: Answer, handle: Handler | None = None) -> Server:
        """Start a server. ``handle`` serves its requests instead of ``answer``."""

        async def instance(_: web.Request) -> web.Response:
            return web.json_response(INSTANCE)

        server = Server(answer)
        app = web.Application()
        app.router.add_post("/v1/completions", handle or server.handle)
        app.router.add_get("/instance", instance)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.place = "{}:{}".format(*runner.addresses[0])
        return server

    async def route(self, prefill: list[str], decode: list[str], **options: float) -> None:
        """Start the router."""
        made = router.Router(prefill, decode, **options)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
        server = uvicorn.Server(uvicorn.Config(router.application(made), log_level="warning"))
        served = asyncio.create_task(server.serve([listener]))

        async def end() -> None:
            server.should_exit = True
            await served

        self._stack.push_async_callback(end)

    async def pair(self, prefill: Answer, decode: Answer, **options: float) -> tuple[Server, Server]:
        """A server of each kind, behind the router."""
        servers = await self.server(prefill), await self.server(decode)
        await self.route([servers[0].vllm], [servers[1].vllm], **options)
        return servers

    def post(self, **body: Any) -> Any:
        """A request, as a context manager of aiohttp."""
        return self.session.post(self.url, json={"prompt": [1], "max_tokens": 9, **body})

    async def ask(self, **body: Any) -> tuple[int, Any]:
        """The answer to a request."""
        async with self.post(**body) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text.startswith("{") else text


Story = Callable[[World], Awaitable[None]]


def run(story: Story) -> None:
    """Play it in a loop of its own."""

    async def play() -> None:
        async with AsyncExitStack() as stack:
            world = World(stack)
            async with aiohttp.ClientSession() as world.session:
                await story(world)

    asyncio.run(play())


def test_decode_is_asked_at_once_as_soon_as_the_origin_is_known() -> None:
    """The first request goes after prefill; of the second prefill answers only once decode has been asked."""

    async def story(world: World) -> None:
        decode = await world.server(decodes())
        prefill = await world.server(
            in_turn(computes(), computes(after=lambda: decode.until(lambda: len(decode.asked) == 2)))
        )
        await world.route([prefill.vllm], [decode.vllm])
        for _ in range(2):
            assert await world.ask(kv_transfer_params={"addresses": ["unix:///evil"]}) == (
                200, {"choices": [{"text": "decoded"}]}
            )  # fmt: skip
        first, second = decode.params
        assert first["first_token"] == 7
        assert (second["instance"], second["addresses"]) == ("P", ["unix:///p"])
        assert (second["do_remote_prefill"], second["do_remote_decode"]) == (True, False)
        assert [one["transfer_id"] for one in decode.params] == [one["transfer_id"] for one in prefill.params]
        assert len({one["transfer_id"] for one in prefill.params}) == 2
        assert [one["max_tokens"] for one in prefill.asked] == [1, 1]

    run(story)


@pytest.mark.parametrize("after_prefill", [False, True])
def test_first_requests_and_the_option_go_after_prefill(after_prefill: bool) -> None:
    """Also several first requests together."""

    async def story(world: World) -> None:
        decode = await world.server(decodes())
        both = asyncio.Barrier(2)

        async def not_yet() -> None:
            assert decode.asked == []
            await both.wait()

        prefill = await world.server(computes(after=not_yet))
        await world.route([prefill.vllm], [decode.vllm], after_prefill=after_prefill)
        assert [status for status, _ in await asyncio.gather(world.ask(), world.ask())] == [200, 200]
        if after_prefill:
            decode.asked.clear()
            assert [status for status, _ in await asyncio.gather(world.ask(), world.ask())] == [200, 200]

    run(story)


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_by_prefill_ends_the_request_of_decode(stream: bool) -> None:
    """The client gets prefill's own answer; there is no second attempt."""

    async def story(world: World) -> None:
        decode = await world.server(in_turn(decodes(), decodes(after=never)))

        async def too_long(body: dict[str, Any]) -> web.StreamResponse:
            await decode.until(lambda: len(decode.asked) == 2)
            return await fails(400, "the prompt is too long")(body)

        prefill = await world.server(in_turn(computes(), too_long))
        await world.route([prefill.vllm], [decode.vllm])
        assert (await world.ask())[0] == 200
        assert await world.ask(stream=stream) == (400, {"error": {"message": "the prompt is too long"}})
        await decode.until(lambda: len(decode.ended) == 1)
        assert len(prefill.asked) == 2

    run(story)


def test_a_refusal_by_decode_ends_the_request_of_prefill() -> None:
    async def story(world: World) -> None:
        prefill = await world.server(in_turn(computes(), computes(after=never)))
        decode = await world.server(in_turn(decodes(), fails(400, "too long")))
        await world.route([prefill.vllm], [decode.vllm])
        assert (await world.ask())[0] == 200
        assert await world.ask() == (400, {"error": {"message": "too long"}})
        await prefill.until(lambda: len(prefill.ended) == 1)

    run(story)


def test_a_prefill_server_that_cannot_be_reached_is_passed_over() -> None:
    """Without another one the client gets an error, and decode is never asked."""

    async def story(world: World) -> None:
        prefill, decode = await world.server(computes()), await world.server(decodes())
        await world.route([GONE, prefill.vllm], [decode.vllm])
        assert (await world.ask())[0] == 200
        await world.route([GONE], [decode.vllm])
        decode.asked.clear()
        status, answer = await world.ask()
        assert (status, answer["error"]["type"]) == (502, "router_error")
        assert "http://127.0.0.1:9: " in answer["error"]["message"]
        assert decode.asked == []

    run(story)


def test_a_prefill_server_that_dies_ends_the_request_of_decode() -> None:
    """The second attempt goes to another one, after prefill, and the next request to the dead one does so, too."""

    async def story(world: World) -> None:
        decode = await world.server(in_turn(decodes(), decodes(), decodes(after=never), decodes()))

        async def dead(body: dict[str, Any]) -> web.StreamResponse:
            await decode.until(lambda: len(decode.asked) == 3)
            return await fails(500, "dead")(body)

        one, two = await world.server(in_turn(computes("P"), dead, computes("P"))), await world.server(computes("Q"))
        await world.route([one.vllm, two.vllm], [decode.vllm])
        for _ in range(3):  # one, two; then one, which dies, and two
            assert (await world.ask())[0] == 200
        await decode.until(lambda: len(decode.ended) == 1)
        assert [params["instance"] for params in decode.params] == ["P", "Q", "P", "Q"]
        assert len({params["transfer_id"] for params in decode.params}) == 4
        assert "first_token" in decode.params[-1], "the second attempt goes after prefill"
        assert (await world.ask())[0] == 200
        assert "first_token" in decode.params[-1], "the origin is forgotten"

    run(story)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_decode_begins_the_request_anew_once(stream: bool) -> None:
    """VLLM reports a failed load by status 500, or in the stream."""

    async def failed(body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            return await fails(500, "no rows")(body)
        error = json.dumps({"error": {"message": "no rows"}})
        return web.Response(text=f"data: {error}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    async def story(world: World) -> None:
        prefill, decode = await world.pair(computes(), in_turn(decodes(), failed, decodes(), failed))
        assert (await world.ask())[0] == 200
        assert (await world.ask(stream=stream))[0] == 200
        assert [("first_token" in one) for one in decode.params] == [True, False, True]
        assert len({one["transfer_id"] for one in prefill.params}) == 3
        assert await world.ask(stream=stream) == (500, {"error": {"message": "no rows"}})
        assert len(decode.asked) == 5

    run(story)


def test_a_prefill_server_that_has_restarted_is_noticed() -> None:
    """Decode waits for an instance that is gone: its request is ended, and the next attempt has the new origin."""

    async def story(world: World) -> None:
        _, decode = await world.pair(
            in_turn(computes("P"), computes("P2", addresses="unix:///p2")),
            in_turn(decodes(), decodes(after=never), decodes()),
        )
        for _ in range(3):
            assert (await world.ask())[0] == 200
        await decode.until(lambda: len(decode.ended) == 1)
        assert [one["instance"] for one in decode.params] == ["P", "P", "P2", "P2"]
        assert "first_token" not in decode.params[-1], "decode is asked at once again"

    run(story)


def test_a_server_with_data_parallel_ranks_is_asked_first() -> None:
    """Its answers name the ranks in turn, so decode cannot be told before."""

    async def story(world: World) -> None:
        ranks = [computes("P_dp0"), computes("P_dp1")] * 10
        prefill, decode = await world.pair(in_turn(*ranks), decodes())
        for _ in range(8):
            assert (await world.ask())[0] == 200
        served = [one["instance"] for one in decode.params if "first_token" in one]
        assert len(served) >= 6
        asked = len(prefill.asked)
        assert (await world.ask())[0] == 200
        assert len(prefill.asked) == asked + 1

    run(story)


def test_a_prompt_that_prefill_does_not_send_is_computed_by_decode() -> None:
    """Of a request that decode awaits already, too."""

    async def nothing(body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"choices": []})

    async def story(world: World) -> None:
        _, decode = await world.pair(
            in_turn(nothing, computes(), nothing), in_turn(decodes(), decodes(), decodes(after=never), decodes())
        )
        for _ in range(3):
            assert (await world.ask())[0] == 200
        await decode.until(lambda: len(decode.ended) == 1)
        assert [bool(one) for one in decode.params] == [False, True, True, False]

    run(story)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_client_that_goes_away_ends_both_requests(at_once: bool, stream: bool) -> None:
    async def story(world: World) -> None:
        prefill = await world.server(in_turn(computes(), computes(after=never)))
        decode = await world.server(in_turn(decodes(), decodes(after=never)))
        await world.route([prefill.vllm], [decode.vllm], after_prefill=not at_once)
        assert (await world.ask())[0] == 200
        asked = asyncio.create_task(world.ask(stream=stream))
        await prefill.until(lambda: len(prefill.asked) == 2)
        if at_once:
            await decode.until(lambda: len(decode.asked) == 2)
        asked.cancel()
        await prefill.until(lambda: len(prefill.ended) == 1)
        if at_once:
            await decode.until(lambda: len(decode.ended) == 1)
        else:
            assert len(decode.asked) == 1

    run(story)


def test_a_stream_comes_part_by_part_and_ends_with_its_client() -> None:
    async def story(world: World) -> None:
        go, ended = asyncio.Event(), asyncio.Event()

        async def stream(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b"data: 1\n\n")
            try:
                await go.wait()
                await response.write(b"data: 2\n\n")
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.set()
                raise
            return response

        prefill, decode = await world.server(computes()), await world.server(decodes(), stream)
        await world.route([prefill.vllm], [decode.vllm])
        async with world.post(stream=True) as answer:
            assert await answer.content.readline() == b"data: 1\n"
            go.set()
            assert [await answer.content.readline() for _ in range(2)] == [b"\n", b"data: 2\n"]
            answer.close()
        await ended.wait()

    run(story)


def test_a_body_that_is_no_request_is_refused() -> None:
    async def story(world: World) -> None:
        prefill, _ = await world.pair(computes(), decodes())
        async with world.session.post(world.url, data=b"{") as answer:
            assert answer.status == 422
        assert prefill.asked == []

    run(story)


ROOM = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


def room_of(body: dict[str, Any]) -> list[Any]:
    """The place and the room of a request to SGLang."""
    return [body[key] for key in ROOM]


def test_both_servers_of_sglang_are_asked_at_once_in_one_room() -> None:
    """The room is the router's own, and another one for each request; other parameters of the client stay."""

    async def story(world: World) -> None:
        decode = await world.server(decodes())

        async def computed(body: dict[str, Any]) -> web.StreamResponse:
            await decode.until(lambda: body["bootstrap_room"] in [one["bootstrap_room"] for one in decode.asked])
            return web.json_response({})

        prefill = await world.server(computed)
        await world.route([prefill.first], [decode.sglang])
        for _ in range(2):
            status, _ = await world.ask(bootstrap_room=7, bootstrap_host="evil", custom_params={"a": 1})
            assert status == 200
        await prefill.until(lambda: len(prefill.asked) == 2)
        host, port = prefill.place.split(":")
        rooms = [room_of(body) for body in decode.asked]
        assert rooms == [room_of(body) for body in prefill.asked]
        assert [place[:2] for place in rooms] == [[host, int(port)]] * 2
        assert len({room for *_, room in rooms} - {7}) == 2
        assert all(body["custom_params"] == {"a": 1} for body in (*prefill.asked, *decode.asked))
        assert all("kv_transfer_params" not in body for body in decode.asked)

    run(story)


@pytest.mark.parametrize("stream", [False, True])
def test_decodes_answer_does_not_wait_for_that_of_sglangs_prefill(stream: bool) -> None:
    """Prefill is asked without a stream, and answers when its scheduler looks at the transfer."""

    async def story(world: World) -> None:
        go = asyncio.Event()

        async def late(body: dict[str, Any]) -> web.StreamResponse:
            await go.wait()
            return web.json_response({})

        prefill, decode = await world.server(late), await world.server(decodes())
        await world.route([prefill.first], [decode.sglang])
        assert (await world.ask(stream=stream, stream_options={"include_usage": True}))[0] == 200
        assert (prefill.asked[0]["stream"], "stream_options" in prefill.asked[0]) == (False, False)
        assert prefill.ended == [], "the request of prefill goes on"
        go.set()

    run(story)


def test_vllm_decodes_what_sglang_prefills() -> None:
    """The transfer is named after the room; the bootstrap server says where the rows are."""

    async def story(world: World) -> None:
        decode = await world.server(decodes())

        async def computed(body: dict[str, Any]) -> web.StreamResponse:
            await decode.until(lambda: len(decode.asked) == 1)
            return web.json_response({})

        prefill = await world.server(computed)
        await world.route([prefill.first], [decode.vllm])
        assert (await world.ask(custom_params={"disagg_kv_first_token": 3}))[0] == 200
        room = prefill.asked[0]["bootstrap_room"]
        assert decode.params == [{"do_remote_prefill": True, "transfer_id": f"sglang {room}", **INSTANCE}]
        assert all("custom_params" not in body for body in (*prefill.asked, *decode.asked))
        assert not set(ROOM) & set(decode.asked[0])

    run(story)


def test_sglang_decodes_what_vllm_prefills() -> None:
    """Decode is asked after prefill, with its first token, and with the router as bootstrap server."""

    async def story(world: World) -> None:
        found: list[Any] = []

        async def decoded(body: dict[str, Any]) -> web.StreamResponse:
            url = "http://{}:{}/instance".format(*room_of(body)[:2])
            async with world.session.get(url) as answer:
                found.append(await answer.json())
            return web.json_response({})

        prefill = await world.server(in_turn(computes("P"), computes("P2")))
        decode = await world.server(decoded)
        await world.route([prefill.vllm], [decode.sglang])
        for _ in range(2):
            assert (await world.ask(custom_params={"disagg_kv_first_token": 3}))[0] == 200
        assert found == [{"instance": name, "addresses": ["unix:///p"]} for name in ("P", "P2")]
        assert [one["transfer_id"] for one in prefill.params] == [
            f"sglang {body['bootstrap_room']}" for body in decode.asked
        ]
        assert all(body["custom_params"] == {"disagg_kv_first_token": 7} for body in decode.asked)

    run(story)


def test_with_sglang_a_request_has_one_choice_and_between_the_engines_a_prompt_that_is_sent() -> None:
    async def story(world: World) -> None:
        async def nothing(body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response({"choices": []})

        prefill, decode = await world.server(nothing), await world.server(decodes())
        await world.route([prefill.first], [decode.sglang])
        status, answer = await world.ask(sampling_params={"n": 2})
        assert (status, answer["error"]["message"]) == (400, "n: one choice for each request")
        await world.route([prefill.vllm], [decode.sglang])
        status, answer = await world.ask(n=2)
        assert (status, answer["error"]["message"]) == (400, "n: one choice for each request")
        assert prefill.asked == []
        status, answer = await world.ask()
        assert (status, answer["error"]["type"]) == (502, "router_error")
        assert "sends nothing of this prompt" in answer["error"]["message"]
        assert (len(prefill.asked), len(decode.asked)) == (1, 0)

    run(story)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_failure_of_sglangs_prefill_ends_the_request_of_decode_and_begins_anew_in_another_room(engine: str) -> None:
    async def story(world: World) -> None:
        decode = await world.server(in_turn(decodes(after=never), decodes()))

        async def dead(body: dict[str, Any]) -> web.StreamResponse:
            await decode.until(lambda: len(decode.asked) == 1)
            return await fails(503, "dead")(body)

        async def computed(body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response({})

        prefill = await world.server(in_turn(dead, computed))
        await world.route([prefill.first], [getattr(decode, engine)])
        assert await world.ask() == (200, {"choices": [{"text": "decoded"}]})
        await decode.until(lambda: len(decode.ended) == 1)
        assert len({body["bootstrap_room"] for body in prefill.asked}) == 2

    run(story)


@pytest.mark.parametrize("status", [400, 500])
def test_an_error_of_sglangs_decode_ends_the_request_of_prefill(status: int) -> None:
    """A refusal goes to the client at once, a failure after the second attempt."""

    async def story(world: World) -> None:
        prefill, decode = await world.server(computes(after=never)), await world.server(fails(status, "no"))
        await world.route([prefill.first], [decode.sglang])
        assert await world.ask() == (status, {"error": {"message": "no"}})
        attempts = 1 if status == 400 else 2
        await prefill.until(lambda: len(prefill.ended) == attempts)
        assert len(decode.asked) == attempts

    run(story)


def test_a_client_that_goes_away_ends_both_requests_of_sglang() -> None:
    async def story(world: World) -> None:
        prefill, decode = await world.server(computes(after=never)), await world.server(decodes(after=never))
        await world.route([prefill.first], [decode.sglang])
        asked = asyncio.create_task(world.ask())
        for server in (prefill, decode):
            await server.until(lambda server=server: len(server.asked) == 1)  # type: ignore[misc]
        asked.cancel()
        for server in (prefill, decode):
            await server.until(lambda server=server: len(server.ended) == 1)  # type: ignore[misc]

    run(story)


def test_servers_are_named_with_their_engine() -> None:
    assert router.Server.prefill("vllm=h:1") == router.Server("vllm", "http://h:1")
    assert router.Server.prefill("vllm=https://h:1") == router.Server("vllm", "https://h:1")
    assert router.Server.prefill("sglang=h:1/8998") == router.Server("sglang", "http://h:1", 8998)
    assert router.Server.decode("sglang=https://h:1") == router.Server("sglang", "https://h:1")
    assert router.Server.prefill("sglang=[::1]:1/8998").host == "[::1]"
    for text in ("h:1", "http://h:1", "other=h:1", "sglang=h:1", "sglang=h:1/x", "vllm=h:1/8998", "vllm="):
        with pytest.raises(ValueError, match="neither"):
            router.Server.prefill(text)
    for text in ("h:1", "other=h:1", "sglang="):
        with pytest.raises(ValueError, match="neither"):
            router.Server.decode(text)


def holds(earlier: str) -> Answer:
    """A decode server that does as it is asked."""

    async def answer(body: dict[str, Any]) -> web.StreamResponse:
        asked = body["kv_transfer_params"].get("hold_s")
        found = {"do_remote_decode": True, "do_remote_prefill": False, "earlier": {"transfer_id": earlier}}
        return web.json_response({"choices": [{"text": "decoded"}], "kv_transfer_params": found if asked else None})

    return answer


@pytest.mark.parametrize("after_prefill", [False, True])
def test_the_next_turn_of_a_conversation_names_the_rows_of_the_answer_before(after_prefill: bool) -> None:
    """Once, to whichever prefill server computes it; the client sees no addresses, and gives none."""

    async def story(world: World) -> None:
        prefills = [await world.server(computes(name)) for name in ("P", "Q")]
        decode = await world.server(in_turn(holds("first"), holds("other"), holds("second"), holds("third")))
        await world.route([one.vllm for one in prefills], [decode.vllm], hold_s=9.0, after_prefill=after_prefill)
        for conversation in ("a", "b", "a", "a"):
            asked = {"prompt_cache_key": conversation, "kv_transfer_params": {"earlier": {"transfer_id": "evil"}}}
            assert await world.ask(**asked) == (200, {"choices": [{"text": "decoded"}]})
        assert [one.get("earlier") for one in prefills[0].params] == [None, {"transfer_id": "first"}]
        assert [one.get("earlier") for one in prefills[1].params] == [None, {"transfer_id": "second"}]
        assert [one["do_remote_decode"] for one in prefills[0].params] == [True, True]
        assert [one["hold_s"] for one in decode.params] == [9.0] * 4
        assert not any("earlier" in one for one in decode.params)

    run(story)


def test_requests_that_are_no_conversation_and_streams_are_not_held() -> None:
    """VLLM's streams do not say where the rows are; the prompt of one loads those of the answer before."""

    async def story(world: World) -> None:
        prefill, decode = await world.pair(computes(), holds("first"), hold_s=9.0)
        for body in ({}, {"prompt_cache_key": 3}, {"prompt_cache_key": "a"}, {"prompt_cache_key": "a", "stream": True}):
            assert (await world.ask(**body))[0] == 200
        assert ["hold_s" in one for one in decode.params] == [False, False, True, False]
        assert [one.get("earlier") for one in prefill.params] == [None, None, None, {"transfer_id": "first"}]

    run(story)


def test_nothing_is_held_without_the_option() -> None:
    async def story(world: World) -> None:
        prefill, decode = await world.pair(computes(), holds("first"))
        for _ in range(2):
            assert (await world.ask(prompt_cache_key="a"))[0] == 200
        assert not any("hold_s" in one for one in decode.params)
        assert not any("earlier" in one for one in prefill.params)

    run(story)


def test_a_second_attempt_computes_the_whole_prompt() -> None:
    """The rows may be what failed."""

    async def story(world: World) -> None:
        prefill, decode = await world.pair(
            in_turn(computes(), fails(500, "not loaded"), computes()), holds("first"), hold_s=9.0, after_prefill=True
        )
        for _ in range(2):
            assert (await world.ask(prompt_cache_key="a"))[0] == 200
        assert ["earlier" in one for one in prefill.params] == [False, True, False]
        assert len(decode.asked) == 2

    run(story)


def test_a_prompt_that_prefill_does_not_send_is_held_all_the_same() -> None:
    async def story(world: World) -> None:
        async def nothing(body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response({"kv_transfer_params": None})

        prefill, decode = await world.pair(nothing, holds("first"), hold_s=9.0)
        for _ in range(2):
            assert (await world.ask(prompt_cache_key="a"))[0] == 200
        assert decode.params == [{"hold_s": 9.0}] * 2
        assert prefill.params[1]["earlier"] == {"transfer_id": "first"}

    run(story)
