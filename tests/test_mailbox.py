"""Calls from other threads reach the loop, in order, and a closed mailbox says so."""

import asyncio
import threading

import pytest

from milad import mailbox


@pytest.mark.parametrize("eventfd", [True, False])
def test_calls_of_many_threads_arrive_in_order(eventfd, monkeypatch):
    if eventfd and mailbox._writer() is None:
        pytest.skip("no eventfd on this system")
    if not eventfd:
        monkeypatch.setattr(mailbox, "_writer", lambda: None)

    async def main():
        box = mailbox.Mailbox(asyncio.get_running_loop())
        got, done = [], asyncio.Event()

        def take(thread, i):
            assert threading.current_thread() is threading.main_thread()
            got.append((thread, i))
            if len(got) == 4 * 500:
                done.set()

        threads = [threading.Thread(target=lambda t=t: [box.post(take, t, i) for i in range(500)]) for t in range(4)]
        for thread in threads:
            thread.start()
        await asyncio.wait_for(done.wait(), 30)
        box.close()
        return got

    got = asyncio.run(main())
    assert all([i for t, i in got if t == thread] == list(range(500)) for thread in range(4))


@pytest.mark.skipif(mailbox._writer() is None, reason="no eventfd on this system")
def test_a_thread_in_haste_does_not_run_away_from_the_loop():
    async def main():
        box, behind, done = mailbox.Mailbox(asyncio.get_running_loop()), [], asyncio.Event()

        def take():
            sum(range(2000))                 # slower than posting is
            behind.append(len(box._calls))

        thread = threading.Thread(target=lambda: [box.post(take) for _ in range(5000)] and box.post(done.set))
        thread.start()
        await asyncio.wait_for(done.wait(), 60)
        box.close()
        return max(behind)

    assert asyncio.run(main()) < 2 * mailbox.FAR_BEHIND


def test_a_call_that_fails_is_reported_and_the_next_ones_run():
    async def main():
        loop, reports, done = asyncio.get_running_loop(), [], asyncio.Event()
        loop.set_exception_handler(lambda loop, context: reports.append(context["exception"]))
        box = mailbox.Mailbox(loop)
        box.post(lambda: 1 / 0)
        box.post(done.set)
        await asyncio.wait_for(done.wait(), 10)
        box.close()
        return reports

    assert [type(e) for e in asyncio.run(main())] == [ZeroDivisionError]


@pytest.mark.parametrize("close", [True, False])
def test_after_the_end_a_post_says_so(close):
    async def main():
        box = mailbox.Mailbox(asyncio.get_running_loop())
        if close:
            box.close()
        return box

    with pytest.raises(RuntimeError):
        asyncio.run(main()).post(print)
