"""Connections that are kept: whose each is, how many are made at a time, and what becomes of them."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from midflight.engines.http import Client, Limits, Patience
from midflight.engines.http.reading import Reply, WireError
from midflight.engines.http.wire import MOST_CONNECTING, Pool
from tests.engines.serving import LOOPS, Served, ok, served, whole


@contextmanager
def served_apart() -> Iterator[Served]:
    """A server on an event loop of its own."""
    ready, stop = threading.Event(), threading.Event()
    there: list[Served] = []

    def serve() -> None:
        async def until_stopped() -> None:
            async with served(ok({})) as server:
                there.append(server)
                ready.set()
                while not stop.is_set():
                    await asyncio.sleep(0.01)

        asyncio.run(until_stopped())

    thread = threading.Thread(target=serve)
    thread.start()
    ready.wait()
    try:
        yield there[0]
    finally:
        stop.set()
        thread.join()


@pytest.mark.asyncio
async def test_connections_are_kept_and_their_number_is_that_of_requests_at_once() -> None:
    async with served(ok({}), delay=0.02) as server:
        pool = Pool(server.base_url)
        for _ in range(3):
            await asyncio.gather(*(pool.ask("GET", "/x") for _ in range(5)))
        assert len({id(request.transport) for request in server.requests}) == 5
        assert {request.path for request in server.requests} == {"/v1/x"}
        await pool.ask("GET", "//health")
        assert server.requests[-1].path == "/health"


@pytest.mark.asyncio
@pytest.mark.parametrize("reset", [False, True])
async def test_a_kept_connection_that_the_server_closed_is_replaced_without_a_retry(reset: bool) -> None:
    connections, requests = 0, 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections, requests
        connections += 1
        await reader.readuntil(b"\r\n\r\n{}")
        requests += 1
        writer.write(whole(b"{}", b"Content-Length: 2"))
        if reset:  # with the next request in its hand, unanswered
            await reader.readuntil(b"\r\n\r\n{}")
            writer.transport.abort()
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        attempts: list[int] = []
        asking = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", Patience(Limits(retries=0)))
        for _ in range(6):
            assert await asking.ask("/x", {}, lambda answer: answer, before=attempts.append) == {}
    assert attempts == [1] * 6 and connections == requests == 6


@pytest.mark.asyncio
async def test_only_silence_on_a_kept_connection_is_asked_again_and_only_once() -> None:
    for answer in (b"HTTP/1.1 2", b""):
        seen: list[int] = []

        async def handle(
            reader: asyncio.StreamReader,
            writer: asyncio.StreamWriter,
            answer: bytes = answer,
            seen: list[int] = seen,
        ) -> None:
            seen.append(0)
            number = len(seen)
            while await reader.readuntil(b"\r\n\r\n{}"):
                seen[number - 1] += 1
                if number == 1 and seen[0] == 1:
                    writer.write(whole(b"{}", b"Content-Length: 2"))
                    continue
                writer.write(answer)
                writer.close()
                return

        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            pool = Pool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            await pool.ask("POST", "/x", body=b"{}")
            with pytest.raises(WireError, match="the server closed the connection before its answer was whole"):
                await pool.ask("POST", "/x", body=b"{}")
        assert seen == ([2, 1] if answer == b"" else [2])


def test_an_event_loop_closes_its_connections_when_it_ends_and_the_next_gets_its_own() -> None:
    with served_apart() as server:
        pool = Pool(server.base_url)

        async def twice() -> set[Any]:
            await pool.ask("GET", "/")
            await pool.ask("GET", "/")
            assert not any(connection._transport.is_closing() for connection in pool._open)
            return set(pool._open)

        first, second = asyncio.run(twice()), asyncio.run(twice())
        assert len(first) == len(second) == 1 and not first & second
        assert all(connection._transport.is_closing() for connection in first | second)
        assert len({id(request.transport) for request in server.requests}) == 2


def test_each_event_loop_has_its_own_turns_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midflight.engines.http.wire.MOST_CONNECTING", 1)
    pool = Pool("http://127.0.0.1:1")

    async def three() -> list[Any]:
        Connecting(monkeypatch)
        return await asyncio.gather(*(pool.ask("GET", "/") for _ in range(3)), return_exceptions=True)

    for _ in range(2):
        assert [type(one) for one in asyncio.run(three())] == [ConnectionRefusedError] * 3


@pytest.mark.asyncio
async def test_cancelling_a_request_closes_its_connection_so_that_the_server_stops() -> None:
    async with served(None) as server:
        asking = Client(server.base_url, Patience(Limits()))
        task = asyncio.create_task(asking.ask("/x", {}, lambda answer: answer))
        while not server.requests:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not asking.pool._open  # which is here still: collected, it would close what it has
        async with asyncio.timeout(5):
            while not server.cancelled:
                await asyncio.sleep(0.001)
        assert (server.cancelled, server.at_once, len(server.requests)) == (1, 0, 1)


class Connecting:
    """The event loop's way to a server, a little longer; `ready` says when the connection of a number may be made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ready: Callable[[int], bool] = lambda number: True) -> None:
        self.begun = self.ended = self.most = 0
        loop = asyncio.get_running_loop()
        connect = loop.create_connection

        async def slowly(*given: Any, **named: Any) -> Any:
            number, self.begun = self.begun, self.begun + 1
            self.most = max(self.most, self.begun - self.ended)
            await asyncio.sleep(0.01)
            while not ready(number):
                await asyncio.sleep(0.001)
            self.ended += 1
            return await connect(*given, **named)

        monkeypatch.setattr(loop, "create_connection", slowly)


@pytest.mark.asyncio
async def test_so_many_connections_are_made_at_a_time_and_the_first_requests_leave_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(ok({}), delay=0.1) as server:
        first = MOST_CONNECTING // 2
        connecting = Connecting(monkeypatch, lambda number: number < first or len(server.requests) >= first)
        pool = Pool(server.base_url)
        async with asyncio.timeout(20):
            await asyncio.gather(*(pool.ask("GET", "/x") for _ in range(3 * MOST_CONNECTING)))
        assert connecting.most == MOST_CONNECTING and len(server.requests) == 3 * MOST_CONNECTING


@pytest.mark.asyncio
async def test_who_waits_to_connect_takes_a_connection_that_has_come_free(monkeypatch: pytest.MonkeyPatch) -> None:
    connecting = Connecting(monkeypatch)
    async with served(ok({})) as server:
        pool = Pool(server.base_url)
        await asyncio.gather(*(pool.ask("GET", "/x") for _ in range(10 * MOST_CONNECTING)))
        assert len(server.requests) == 10 * MOST_CONNECTING
        async with asyncio.timeout(5):
            while pool._connecting:
                await asyncio.sleep(0.001)
        assert connecting.ended == len(pool._open) < 5 * MOST_CONNECTING


@pytest.mark.asyncio
async def test_connections_that_come_free_serve_all_while_no_other_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    connecting = Connecting(monkeypatch, lambda number: number < 4)
    async with served(ok({})) as server, asyncio.timeout(5):
        pool = Pool(server.base_url)
        answered: list[int] = []

        async def ask(number: int) -> None:
            await pool.ask("GET", "/x")
            answered.append(number)

        await asyncio.gather(*(ask(number) for number in range(4 * MOST_CONNECTING)))
        assert answered == list(range(4 * MOST_CONNECTING))  # in the order they came
        assert (connecting.ended, len(pool._open), len(pool._connecting)) == (4, 4, MOST_CONNECTING)


@pytest.mark.asyncio
async def test_a_connection_that_is_never_made_fails_in_its_time_and_makes_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("midflight.engines.http.wire.MOST_CONNECTING", 1)
    monkeypatch.setattr("midflight.engines.http.wire.CONNECT_SECONDS", 0.05)
    connecting = Connecting(monkeypatch, lambda number: number == 1)
    async with served(ok({})) as server, asyncio.timeout(5):
        pool = Pool(server.base_url)
        first, second = await asyncio.gather(pool.ask("GET", "/"), pool.ask("GET", "/"), return_exceptions=True)
        assert isinstance(first, TimeoutError) and str(first) == "no connection within 0.05 s"
        assert isinstance(second, Reply) and second.status == 200 and connecting.begun == 2


@pytest.mark.asyncio
async def test_another_is_begun_for_whose_connection_went_to_who_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(None, ok({})) as server, asyncio.timeout(5):

        def ready(number: int) -> bool:
            if number == 0 and server.requests:
                raise ConnectionRefusedError
            return number > 0

        connecting = Connecting(monkeypatch, ready)
        pool = Pool(server.base_url)
        first = asyncio.create_task(pool.ask("GET", "/first"))
        await asyncio.sleep(0)
        assert (await pool.ask("GET", "/second")).status == 200
        assert [request.path for request in server.requests] == ["/v1/first", "/v1/second"] and connecting.begun == 3
        first.cancel()


@pytest.mark.asyncio
async def test_no_request_gets_the_failure_of_a_connection_begun_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midflight.engines.http.wire.CONNECT_SECONDS", 0.2)
    connecting = Connecting(monkeypatch, lambda number: number == 1)
    async with served(ok({})) as server, asyncio.timeout(5):
        pool = Pool(server.base_url)
        first = asyncio.create_task(pool.ask("GET", "/"))
        while connecting.begun < 1:
            await asyncio.sleep(0.001)
        first.cancel()
        await asyncio.wait([first])
        assert (await pool.ask("GET", "/")).status == 200
        assert connecting.begun == 2


@pytest.mark.asyncio
async def test_connections_begun_for_cancelled_requests_make_place(monkeypatch: pytest.MonkeyPatch) -> None:
    connecting = Connecting(monkeypatch, lambda number: number >= MOST_CONNECTING)
    async with served(ok({})) as server, asyncio.timeout(5):
        pool = Pool(server.base_url)
        hung = [asyncio.create_task(pool.ask("GET", "/")) for _ in range(MOST_CONNECTING)]
        while connecting.begun < MOST_CONNECTING:
            await asyncio.sleep(0.001)
        for task in hung[1:]:
            task.cancel()
        await asyncio.wait(hung[1:])
        assert len(pool._connecting) == MOST_CONNECTING
        replies = await asyncio.gather(*(pool.ask("GET", "/") for _ in range(MOST_CONNECTING)))
        assert [reply.status for reply in replies] == [200] * MOST_CONNECTING
        assert (await hung[0]).status == 200  # over one that came free


@pytest.mark.asyncio
async def test_nobody_is_stranded_when_one_attempt_fails_as_another_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    connect = loop.create_connection
    gates: list[asyncio.Future[None]] = []

    async def gated(*given: Any, **named: Any) -> Any:
        made = await connect(*given, **named)
        gates.append(loop.create_future())
        await gates[-1]
        return made

    async with served(whole(b"{}", b"Content-Length: 2\r\nConnection: close")) as server, asyncio.timeout(5):
        pool = Pool(server.base_url)
        with monkeypatch.context() as patched:
            patched.setattr(loop, "create_connection", gated)
            first, second, third = (asyncio.create_task(pool.ask("GET", "/")) for _ in range(3))
            while len(gates) < 3:
                await asyncio.sleep(0)
        gates[1].set_result(None)
        assert (await first).status == 200  # over the connection that was begun for the second
        gates[0].set_exception(ConnectionRefusedError("no"))  # and so is nothing to the first
        gates[2].set_result(None)  # goes to the second
        assert [(await one).status for one in (second, third)] == [200, 200]


@pytest.mark.asyncio
async def test_who_waits_already_gets_the_place_of_a_request_that_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    connecting = Connecting(monkeypatch, lambda number: number >= MOST_CONNECTING)
    async with served(ok({})) as server, asyncio.timeout(5):
        pool = Pool(server.base_url)
        hung = [asyncio.create_task(pool.ask("GET", "/")) for _ in range(MOST_CONNECTING)]
        late = asyncio.create_task(pool.ask("GET", "/"))
        while connecting.begun < MOST_CONNECTING:
            await asyncio.sleep(0.001)
        hung[3].cancel()
        assert (await late).status == 200 and connecting.begun == MOST_CONNECTING + 1
        for task in hung:
            task.cancel()


@pytest.mark.asyncio
async def test_a_request_that_is_cancelled_before_its_connection_is_begun_leaves_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("midflight.engines.http.wire.MOST_CONNECTING", 1)
    open_ = False
    connecting = Connecting(monkeypatch, lambda number: open_)
    async with served(ok({})) as server, asyncio.timeout(5):
        pool = Pool(server.base_url)
        asked = [asyncio.create_task(pool.ask("GET", "/")) for _ in range(3)]
        while connecting.begun < 1:
            await asyncio.sleep(0.001)
        asked[1].cancel()
        await asyncio.wait([asked[1]])
        assert asked[1].cancelled() and not pool._forsaken
        last = asyncio.create_task(pool.ask("GET", "/"))
        await asyncio.sleep(0.02)
        assert connecting.begun == 1
        open_ = True
        assert [(await one).status for one in (asked[0], asked[2], last)] == [200] * 3


@pytest.mark.asyncio
async def test_a_cancelled_request_whose_connection_was_made_after_all_makes_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("midflight.engines.http.wire.MOST_CONNECTING", 1)
    made = 0
    connecting = Connecting(monkeypatch, lambda number: number < made)
    async with served(None, ok({})) as server, asyncio.timeout(5):
        pool = Pool(server.base_url)
        first = asyncio.create_task(pool.ask("GET", "/"))
        while connecting.begun < 1:
            await asyncio.sleep(0.001)
        first.cancel()
        await asyncio.wait([first])
        made = 1
        while not pool._idle:
            await asyncio.sleep(0.001)
        stays = asyncio.create_task(pool.ask("GET", "/"))  # on that connection
        others = [asyncio.create_task(pool.ask("GET", "/")) for _ in range(2)]  # one connects, one waits for its place
        while connecting.begun < 2:
            await asyncio.sleep(0.001)
        assert not pool._forsaken and connecting.begun == 2
        made = 3
        assert [(await one).status for one in others] == [200, 200]
        stays.cancel()


def test_two_event_loops_may_take_turns_with_one_pool() -> None:
    with served_apart() as server, asyncio.Runner() as first, asyncio.Runner() as second:
        pool, left, said = Pool(server.base_url), [], []

        async def ask() -> int:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["message"]))
            left.extend(asyncio.create_task(pool.ask("GET", "/")) for _ in range(3))
            async with asyncio.timeout(5):
                return (await pool.ask("GET", "/")).status

        assert [runner.run(ask()) for runner in (first, second) * 3] == [200] * 6
        assert said == []


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("make", LOOPS)
def test_an_event_loop_may_end_at_any_moment(make: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with served_apart() as server:
        pool, said = Pool(server.base_url), []

        async def ask(requests: int, rounds: int) -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["message"]))
            tasks = [asyncio.create_task(pool.ask("GET", "/")) for _ in range(requests)]
            for _ in range(rounds):
                await asyncio.sleep(0)
            assert len(tasks) == requests

        for requests in (1, 3, 40, 100):
            for rounds in range(14):
                with asyncio.Runner(loop_factory=make) as runner:
                    runner.run(ask(requests, rounds))
        gc.collect()
        assert said == []


@pytest.mark.asyncio
async def test_a_connection_that_nobody_waits_for_any_more_is_kept_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go = asyncio.Event()
    connecting = Connecting(monkeypatch, lambda number: go.is_set())
    async with served(ok({})) as server, asyncio.timeout(5):
        pool = Pool(server.base_url)
        tasks = [asyncio.create_task(pool.ask("GET", "/")) for _ in range(5)]
        while connecting.begun < 5:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        go.set()
        while pool._connecting:
            await asyncio.sleep(0.001)
        idle = list(pool._idle)
        assert len(idle) == 5 and all(one.kept for one in idle)  # one that breaks at once is replaced
        idle[-1].connection_lost(None)  # as the server may do with one that is not used
        for _ in range(5):
            assert (await pool.ask("GET", "/")).status == 200
        assert (connecting.begun, len(pool._open), pool.replaced) == (5, 4, 0)
        assert idle[-1]._transport.is_closing()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.asyncio
async def test_a_connection_for_a_request_that_was_just_cancelled_goes_to_the_next(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    connecting = Connecting(monkeypatch, lambda number: number == 0)
    async with served(ok({})) as server, asyncio.timeout(5):
        pool = Pool(server.base_url)
        first, second = (asyncio.create_task(pool.ask("GET", "/")) for _ in range(2))
        give = pool._give

        def given(connection: Any) -> None:
            if not late:
                first.cancel()
            give(connection)
            if late:
                first.cancel()

        monkeypatch.setattr(pool, "_give", given)
        assert (await second).status == 200
        assert (
            first.cancelled()
            and not pool._waiting
            and (connecting.ended, len(pool._open), len(server.requests)) == (1, 1, 1)
        )


@pytest.mark.asyncio
async def test_a_connection_that_ends_between_given_and_asked_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(ok({})) as server, asyncio.timeout(5):
        pool = Pool(server.base_url)
        give = pool._give

        def given(connection: Any) -> None:
            give(connection)
            connection.connection_lost(None)

        monkeypatch.setattr(pool, "_give", given)
        with pytest.raises(WireError, match="^the server closed the connection before its answer was whole$"):
            await pool.ask("GET", "/")


@pytest.mark.asyncio
async def test_a_connection_that_came_free_and_was_closed_is_replaced_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midflight.engines.http.wire.MOST_CONNECTING", 1)
    seen: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(0)
        number = len(seen) - 1
        while seen[number] < 2 and await reader.readuntil(b"\r\n\r\n"):
            seen[number] += 1
            if seen[number] == 1:
                writer.write(whole(b"{}", b"Content-Length: 2"))
        writer.transport.abort()  # with the second request in its hand

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        pool = Pool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

        async def ask() -> bytes:
            return (await pool.ask("GET", "/")).body

        first = asyncio.create_task(ask())
        Connecting(monkeypatch, lambda number: number == 0 or first.done())  # so the second gets the first's
        assert await asyncio.gather(first, ask(), ask()) == [b"{}"] * 3
    assert pool.replaced == 1 and seen == [2, 1, 1]


@pytest.mark.parametrize(
    "url", ["ftp://x", "127.0.0.1:80", "http://", "https:///v1", "http://a..b", "http://h/é", f"http://{'x' * 64}"]
)
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ValueError):
        Pool(url)
