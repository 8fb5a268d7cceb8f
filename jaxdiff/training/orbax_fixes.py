"""What this package needs of Orbax beside checkpoints: timeouts by monotonic time, threads that do not hold up the end
of a process, memory that does not grow, the client of JAX's processes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import time
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

from orbax.checkpoint import multihost


def apply() -> None:
    """Change what Orbax does in four places; a version without these modules is left as it is.

    It measures by monotonic time: a wall clock that is set during a save would end the run. What its modules call
    `time` is replaced.

    Its threads are daemons. After a save that fails, they wait up to five minutes for each other, and with them the
    exit of the process. A save that succeeds is waited for before a run ends.

    Its event loops are silent once closed: a save or a restore that fails closes its loop while TensorStore is still
    at work on other arrays, and each of those would print a traceback.

    It asks TensorStore for little JSON: see `_little_json`.
    """
    for name in ("future", "signaling_client"):
        with contextlib.suppress(ImportError):
            module: Any = importlib.import_module(f"orbax.checkpoint._src.futures.{name}")
            module.time = SimpleNamespace(**{**vars(time), "time": time.monotonic})
            if hasattr(module, "_SignalingThread"):
                module._SignalingThread = partial(module._SignalingThread, daemon=True)
    with contextlib.suppress(ImportError, AttributeError):
        module = importlib.import_module("orbax.checkpoint._src.asyncio_utils")
        module.asyncio = SimpleNamespace(**{**vars(module.asyncio), "new_event_loop": SilentLoop})
    with contextlib.suppress(ImportError, AttributeError):
        _little_json(importlib.import_module("orbax.checkpoint._src.serialization.tensorstore_utils"))


class SilentLoop(asyncio.SelectorEventLoop):
    """An event loop that, once closed, ignores what other threads and abandoned tasks report to it."""

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        except RuntimeError:
            if not self.is_closed():
                raise
        return asyncio.Handle(callback, args, self)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.is_closed():
            super().call_exception_handler(context)


def _little_json(module: Any) -> None:
    """TensorStore (0.1.86) loses memory whenever it turns JSON into Python's objects.

    Orbax has it write out the spec of a checkpoint's folder for every array, 257 bytes each, which is now done once per
    folder; and all its counters, about 12 kB per save, for a line in a log, which now says 0 bytes.
    """
    real = module.ts

    @lru_cache(maxsize=16)
    def resolved(text: str) -> str:
        return json.dumps(real.KvStore.Spec(json.loads(text)).to_json())

    class Spec:
        """Stands for a KvStore.Spec."""

        def __init__(self, given: object) -> None:
            self.given = given

        def to_json(self) -> Any:
            return json.loads(resolved(json.dumps(self.given, sort_keys=True)))

    def opened(spec: Any, *args: Any, **options: Any) -> Any:
        return real.KvStore.open(real.KvStore.Spec(spec.given), *args, **options)

    replaced: dict[str, Any] = {"KvStore": SimpleNamespace(Spec=Spec, open=opened)}
    replaced["experimental_collect_matching_metrics"] = lambda *_, **__: []
    module.ts = SimpleNamespace(**{**vars(real), **replaced})


def coordination_client() -> Any:
    """The client of JAX's coordination service, to which JAX has no public way; None with one process."""
    if not multihost.is_jax_distributed_client_initialized():
        return None
    return multihost.get_jax_distributed_client()
