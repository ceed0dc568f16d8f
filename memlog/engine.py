"""The engine: one thread per process with its own event loop, where memlog's network calls and sending live.

Nothing is bound to the caller's loop: frameworks make a new loop per turn, and a loop that closes must not stop what
was promised. Results cross back over :func:`outcome`, which holds no thread and works on asyncio and trio. The thread
starts with the first use, never at import, and again after a fork.

A second thread runs the users' callbacks, so that a slow or raising one stops nothing.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import logging
import queue
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import sniffio

from memlog import system

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from concurrent.futures import Future

logger = logging.getLogger("memlog")

T = TypeVar("T")

_STOP_SECONDS = 1.0
_FORK_WAIT_SECONDS = 10.0  # the imports of a first request take as long where the machine has much else to do
_PAUSE_SECONDS = 30.0  # of a fork that is never over; it waits for a disk that does not answer, say


def waker(call: Callable[[], object]) -> Callable[[], None]:
    """A function for any thread that runs ``call`` in the loop this is called from. A closed loop is no error."""
    if sniffio.current_async_library() == "trio":
        import trio  # noqa: PLC0415 - only who runs trio has it

        token = trio.lowlevel.current_trio_token()

        def wake_trio() -> None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(call)

        return wake_trio
    loop = asyncio.get_running_loop()

    def wake_asyncio() -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(call)

    return wake_asyncio


async def outcome(future: Future[T]) -> T:
    """Wait for ``future`` in the caller's own loop; cancelling the wait cancels the future."""
    if not future.done():
        done = anyio.Event()
        wake = waker(done.set)
        future.add_done_callback(lambda _: wake())
        try:
            await done.wait()
        except BaseException:
            future.cancel()
            raise
    return future.result()


class Engine:
    """The thread and its loop. Get the process's one from :func:`running`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._stopping = False
        try:
            self.thread = system.start_thread(self._live, "memlog-engine")
        except BaseException:
            self.loop.close()
            raise

    def _live(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not (self._stopping or self.loop.is_closed()):
            # What comes out of it was meant to end the thread, and would strand all who wait; the loop is as it was.
            try:
                self.loop.run_forever()
            except BaseException:
                logger.exception("memlog: the engine was interrupted; it goes on")

    def is_here(self) -> bool:
        """Whether the caller runs in the engine's thread."""
        return threading.current_thread() is self.thread

    def spawn(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work`` in the engine's loop, in a context of its own: a caller's variables end with the caller."""
        return contextvars.Context().run(asyncio.run_coroutine_threadsafe, work, self.loop)

    def soon(self, call: Callable[..., object], *args: object) -> None:
        """Run ``call(*args)`` in the engine's loop; nothing if it is gone."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(call, *args, context=contextvars.Context())

    async def call(self, function: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
        """Await ``function(*args, **options)`` in the engine's loop, from any loop. Cancelling cancels it there."""
        if self.is_here():
            return await function(*args, **options)
        return await outcome(self.spawn(_as_coroutine(function, args, options)))

    def block(self, function: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
        """Like :meth:`call`, holding the calling thread; RuntimeError from memlog's own threads."""
        return self.block_for(None, function, *args, **options)

    def block_for(self, seconds: float | None, function: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
        """Like :meth:`block`; TimeoutError after ``seconds``, also if the loop is stuck."""
        refuse_own_thread()
        future = self.spawn(_as_coroutine(function, args, options))
        try:
            return future.result(seconds)
        except BaseException:
            future.cancel()
            raise

    def pause(self, timeout: float) -> Callable[[], None]:
        """Wait until the loop is between two steps, ``timeout`` seconds at most; it goes on when the result is called.

        Nothing in its thread is half done then, an import above all.
        """
        here, go = threading.Event(), threading.Event()

        def hold() -> None:
            here.set()
            go.wait(_PAUSE_SECONDS)

        if not self.is_here():
            self.soon(hold)
            try:
                here.wait(timeout)
            except BaseException:
                go.set()
                raise
        return go.set

    def stop(self, timeout: float) -> None:
        """End the thread, with the process: what runs there stays as it is, and who waits for it is not woken."""
        self._stopping = True
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(timeout)


async def _as_coroutine(function: Callable[..., Awaitable[T]], args: Any, options: Any) -> T:
    return await function(*args, **options)


def is_own_thread() -> bool:
    """Whether the caller runs in a thread of memlog's that others wait for."""
    return threading.current_thread().name in ("memlog-engine", "memlog-writer")


def refuse_own_thread() -> None:
    """Raise RuntimeError in a thread that a blocking call would wait for."""
    if is_own_thread():
        msg = "a blocking call from memlog's own thread would wait for itself; use another thread"
        raise RuntimeError(msg)


class Callbacks:
    """The thread that runs users' callbacks, one after the other; their exceptions are logged, never propagated."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[Any], object], Any] | None] = queue.SimpleQueue()
        self.thread = system.start_thread(self._live, "memlog-callbacks")

    def _live(self) -> None:
        while (entry := self._queue.get()) is not None:
            function, value = entry
            try:
                function(value)
            except BaseException:
                logger.exception("memlog: a callback raised; memlog goes on")

    def call(self, function: Callable[[Any], object], value: object) -> None:
        """Queue ``function(value)``."""
        self._queue.put((function, value))

    def stop(self, timeout: float) -> None:
        """Run what is queued, then end."""
        self._queue.put(None)
        self.thread.join(timeout)


class _Process:
    """What this process has running. Replaced whole in a forked child, where the threads do not exist."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.engine: Engine | None = None
        self.callbacks: Callbacks | None = None


_process = _Process()


_hooked = False
_forking = threading.local()  # several threads may fork at once; each runs its hooks itself


def pause_at_forks() -> None:
    """From now on fork while the engine pauses, and before that buffers do: call it when there is a buffer.

    In a child each lock is as it was, and the thread that would release it is not there. Imports have locks of their
    own: a child that was forked while the engine imported what its first request needs could never import that itself.
    """
    global _hooked  # noqa: PLW0603 - the hooks cannot be taken back
    if not _hooked:
        _hooked = True
        system.at_fork(before=_before_fork, in_parent=_after_fork_in_parent, in_child=_forget_the_pause)


def _before_fork() -> None:
    process = _process
    resume = _forking.resume = []
    while True:
        # Paused without the lock, which a step may want; looked at once more with it, so that none starts meanwhile.
        seen = process.engine
        if seen is not None and seen.thread.is_alive():
            resume.append(seen.pause(_FORK_WAIT_SECONDS))
        if not process.lock.acquire(timeout=_FORK_WAIT_SECONDS):
            return
        resume.append(process.lock.release)
        if process.engine is seen:
            return
        resume.pop()()


def _after_fork_in_parent() -> None:
    for call in _forking.__dict__.pop("resume", ()):
        call()


def _forget_the_pause() -> None:
    _forking.__dict__.clear()


def _after_fork_in_child() -> None:
    # In the hook and not at the first use: several threads may come first, and a lock may have been inherited locked.
    global _process  # noqa: PLW0603 - threads belong to a process, and so does this
    system.park(_process)  # its loop and sockets are the parent's
    _process = _Process()


system.at_fork(in_child=_after_fork_in_child)


def running() -> Engine:
    """This process's engine, started if need be."""
    process = _process
    with process.lock:
        if process.engine is None or not process.engine.thread.is_alive():
            process.engine = Engine()
        return process.engine


def callbacks() -> Callbacks:
    """This process's callback thread, started if need be."""
    process = _process
    with process.lock:
        if process.callbacks is None or not process.callbacks.thread.is_alive():
            process.callbacks = Callbacks()
        return process.callbacks


@atexit.register
def _stop() -> None:
    # Runs after every exit hook registered later, which is those of the logs: by now all that was accepted is stored.
    process = _process
    if process.callbacks is not None:
        process.callbacks.stop(_STOP_SECONDS)
    if process.engine is not None:
        process.engine.stop(_STOP_SECONDS)
        system.park(process)
    system.keep_parked()
