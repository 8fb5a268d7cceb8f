"""Batches of upcoming steps, prepared in a background thread."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from jaxdiff.data.dataset import Dataset, local_slice
from jaxdiff.data.examples import Batch

_END = object()


class Prefetch(Iterator[Batch]):
    """An iterator over batches, to be closed (or used in `with`); `next` raises errors of its thread."""

    def __init__(
        self, batches: queue.Queue, stop: threading.Event, thread: threading.Thread, executor: ThreadPoolExecutor | None
    ):
        self._batches = batches
        self._last: BaseException | None = None
        # The thread holds no reference to this object: one forgotten without close() is collected and ends it too.
        self._close = weakref.finalize(self, _shut_down, batches, stop, thread, executor)

    def __next__(self) -> Batch:
        if self._last is not None:
            raise self._last
        if not self._close.alive:
            raise StopIteration
        item = self._batches.get()
        if item is _END:
            self._last = StopIteration()
        elif isinstance(item, BaseException):
            self._last = item
        else:
            return item
        self.close()
        raise self._last

    def close(self) -> None:
        """Stop the thread and wait for it; may be called twice."""
        self._close()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def prefetch(
    dataset: Dataset,
    start_step: int,
    batch_size: int,
    process_index: int = 0,
    process_count: int = 1,
    *,
    stop_step: int | None = None,
    depth: int = 2,
    workers: int | None = None,
) -> Prefetch:
    """`dataset.batch(s, ...)` for s = start_step, start_step + 1, ... (before `stop_step`), `depth` of them kept ready.

    `workers` threads decode single examples, by default one per core up to eight; data in memory needs none.
    """
    local_slice(start_step, batch_size, process_index, process_count)  # raise its errors in this thread
    if depth < 1:
        raise ValueError(f"depth is the number of batches kept ready, at least 1, got {depth}")
    if workers is None:
        workers = 0 if dataset.in_memory else min(8, os.cpu_count() or 1)
    batches: queue.Queue = queue.Queue(maxsize=depth)
    stop = threading.Event()
    executor = ThreadPoolExecutor(workers, "jaxdiff-decode") if workers else None
    split = (batch_size, process_index, process_count)
    thread = threading.Thread(
        target=_produce,
        args=(dataset, start_step, stop_step, split, executor, batches, stop),
        name="jaxdiff-data",
        daemon=True,
    )
    thread.start()
    return Prefetch(batches, stop, thread, executor)


def _produce(
    dataset: Dataset,
    step: int,
    stop_step: int | None,
    split: tuple[int, int, int],
    executor: ThreadPoolExecutor | None,
    batches: queue.Queue,
    stop: threading.Event,
) -> None:
    try:
        while not stop.is_set() and (stop_step is None or step < stop_step):
            batches.put(dataset.batch(step, *split, executor=executor))
            step += 1
        batches.put(_END)
    except BaseException as error:
        batches.put(error)


def _shut_down(
    batches: queue.Queue, stop: threading.Event, thread: threading.Thread, executor: ThreadPoolExecutor | None
) -> None:
    """Stop the threads: the producer may block in `put`, so the queue is drained until it ends."""
    stop.set()
    if executor is not None:
        executor.shutdown(wait=False, cancel_futures=True)  # skip the rest of the batch
    while thread.is_alive():
        with suppress(queue.Empty):
            batches.get(timeout=0.05)
    if executor is not None:
        executor.shutdown(wait=True)
