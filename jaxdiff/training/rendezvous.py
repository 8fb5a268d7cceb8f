"""A rendezvous of all processes at the port that JAX will use: late ones are named, strangers are turned away.

It precedes jax.distributed.initialize, which would abort a late process without naming it. A process sends one line,

    {"jaxdiff": TOKEN, "process": 1, "processes": 2}

and waits for the answer {"jaxdiff": ..., "missing": []} that process 0 gives to all at once. The token is a hash of the
config. It tells runs apart; it is no secret from someone who knows the config. Nothing else is read from a caller: a
line of more than LINE bytes, or one that takes more than PATIENCE seconds, ends its connection, and of more than ROOM
connections without a line the oldest ends. So the deadline holds whatever arrives.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import selectors
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jaxdiff.training.launchers import ProcessSpec

LINE = 1024  # bytes that a caller may send
ANSWER = 2**20  # bytes of the longest answer
PATIENCE = 5.0  # seconds a caller has for its line, and for closing its end
LATER = 30.0  # seconds by which process 0 may start, and so end, later than a caller
ROOM = 64  # connections without a line, beyond the number of processes
CAUSES = (
    "usual causes: the command was not started on every host, hosts cannot reach that port (firewall, other network), "
    "a process failed while importing (check its log), or two processes have the same --process"
)


class Late(TimeoutError):
    """Other processes did not arrive in time; another try may find them."""


def token_of(config: Mapping[str, Any], processes: int) -> str:
    """What the processes of a run have in common and strangers do not."""
    text = json.dumps([config, processes], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def rendezvous(spec: ProcessSpec, timeout: float, token: str = "") -> None:
    """Wait for all processes, or name those that are missing."""
    deadline = time.monotonic() + timeout
    if spec.process:
        _report_in(spec, deadline, timeout, token)
        return
    say(spec, f"at {spec.coordinator}, waiting up to {timeout:.0f} s for processes {names(range(1, spec.processes))}")
    with _listening(spec) as server:
        desk = Desk(spec, server, token)
        try:
            desk.wait(deadline)
            desk.answer()
        finally:
            desk.close()
    if desk.missing and desk.missing <= set(desk.refused):
        reasons = "; ".join(desk.refused[process] for process in sorted(desk.missing))
        raise ValueError(f"the processes of a run differ: {reasons}. Start all of them with the same command")
    if desk.missing:
        raise Late(_late(desk.missing, spec, timeout))


class Desk:
    """Process 0's side: who is present, who has not said a line yet, who was turned away and why."""

    def __init__(self, spec: ProcessSpec, server: socket.socket, token: str) -> None:
        self.spec, self.server, self.token = spec, server, token
        self.silent: dict[socket.socket, tuple[float, bytes]] = {}  # end of its patience, its line so far
        self.present: dict[int, socket.socket] = {}
        self.refused: dict[int, str] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(server, selectors.EVENT_READ)

    @property
    def missing(self) -> set[int]:
        return set(range(1, self.spec.processes)) - set(self.present)

    def wait(self, deadline: float) -> None:
        """Until all are present, or the deadline."""
        told = time.monotonic()
        while self.missing and time.monotonic() < deadline:
            for key, _ in self.selector.select(min(0.2, max(0.0, deadline - time.monotonic()))):
                self._serve(key.fileobj)
            now = time.monotonic()
            for caller in [caller for caller, (end, _) in self.silent.items() if end < now]:
                self._drop(caller)
            if now - told > 10 and self.missing:
                say(self.spec, f"still waiting for processes {names(self.missing)}")
                told = now

    def _serve(self, ready: Any) -> None:
        if ready is self.server:
            self._admit()
        elif ready in self.silent:
            self._listen(ready)
        else:  # one that was present has closed its end, or says more than its line: it will call again
            self.present = {process: caller for process, caller in self.present.items() if caller is not ready}
            self._drop(ready)

    def _admit(self) -> None:
        try:
            caller, _ = self.server.accept()
        except OSError:
            return  # it has gone already, or there are no descriptors left until some callers are dropped
        if len(self.silent) >= ROOM + self.spec.processes:
            self._drop(next(iter(self.silent)))
        caller.setblocking(False)
        self.selector.register(caller, selectors.EVENT_READ)
        self.silent[caller] = (time.monotonic() + PATIENCE, b"")

    def _listen(self, caller: socket.socket) -> None:
        end, before = self.silent[caller]
        try:
            part = caller.recv(LINE)
        except OSError:
            part = b""
        line, newline, _ = (before + part).partition(b"\n")
        if not part or len(line) > LINE:
            self._drop(caller)
        elif newline:
            self._judge(caller, line)
        else:
            self.silent[caller] = (end, line)

    def _judge(self, caller: socket.socket, line: bytes) -> None:
        known = _record(line)
        process, processes = known.get("process"), known.get("processes")
        if "jaxdiff" not in known or not isinstance(process, int) or process in self.present:
            self._drop(caller)  # a stranger; or the second of two, which will call again
            return
        reason = ""
        if processes != self.spec.processes:
            reason = f"process 0 is one of {self.spec.processes} processes, process {process} one of {processes}"
        elif known["jaxdiff"] != self.token:
            reason = f"process 0 and process {process} have different configs"
        elif process not in self.missing:
            reason = f"process {process} of {processes} is not among 1..{self.spec.processes - 1}"
        if reason:
            if process not in self.refused and len(self.refused) < ROOM:
                say(self.spec, f"turned a caller away: {reason}")
                self.refused[process] = reason
            _send(caller, {"refused": reason})
            self._drop(caller)
            return
        del self.silent[caller]
        self.present[process] = caller

    def _drop(self, caller: socket.socket) -> None:
        self.silent.pop(caller, None)
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(caller)
        caller.close()

    def answer(self) -> None:
        """Tell those present who is missing; they close first, which frees the port."""
        deadline = time.monotonic() + PATIENCE
        missing = sorted(self.missing)
        for caller in self.present.values():
            caller.setblocking(True)
            caller.settimeout(PATIENCE)
            _send(caller, {"jaxdiff": _reply(self.token), "missing": missing})
        for caller in self.present.values():
            caller.settimeout(max(0.01, deadline - time.monotonic()))
            with contextlib.suppress(OSError):
                caller.recv(1)

    def close(self) -> None:
        for caller in [*self.silent, *self.present.values()]:
            self._drop(caller)
        self.selector.close()


@contextlib.contextmanager
def _listening(spec: ProcessSpec) -> Iterator[socket.socket]:
    """A listening socket at the address of the spec, or on all interfaces, IPv6 included."""
    six = ":" in spec.bind or (not spec.bind and socket.has_dualstack_ipv6())
    try:
        server = socket.create_server(
            (spec.bind, spec.address[1]),
            family=socket.AF_INET6 if six else socket.AF_INET,
            backlog=ROOM + spec.processes,
            dualstack_ipv6=six and not spec.bind,
        )
    except OSError as error:
        where = spec.coordinator if spec.bind else f"port {spec.address[1]}"
        raise OSError(
            f"process 0 cannot listen on {where}: {error}. If an earlier run still holds it, stop "
            "that run; otherwise choose another port, or an address of this host, in --coordinator"
        ) from error
    with server:
        server.setblocking(False)
        yield server


# ------------------------------------------------------------------------------------------ the others


def _report_in(spec: ProcessSpec, deadline: float, timeout: float, token: str) -> None:
    say(spec, f"waiting up to {timeout:.0f} s for process 0 at {spec.coordinator}")
    while time.monotonic() < deadline:
        answer = _call(spec, deadline, token)
        if "refused" in answer:
            raise ValueError(f"process 0 refused process {spec.process}: {answer['refused']}")
        if answer.get("jaxdiff") == _reply(token) and isinstance(answer.get("missing"), list):
            if answer["missing"]:
                raise Late(_late({int(process) for process in answer["missing"]}, spec, timeout))
            return
        time.sleep(0.2)
    raise Late(_late({0}, spec, timeout))


def _call(spec: ProcessSpec, deadline: float, token: str) -> dict[str, Any]:
    """Report to process 0; its answer, or {} if it cannot be reached or answers something else."""
    try:
        remaining = deadline - time.monotonic()
        with socket.create_connection(spec.address, timeout=min(5.0, max(0.1, remaining))) as call:
            _send(call, {"jaxdiff": token, "process": spec.process, "processes": spec.processes})
            return _record(_line(call, deadline + LATER))
    except OSError:
        return {}


def _line(call: socket.socket, deadline: float) -> bytes:
    """One line, within a deadline for the whole of it."""
    line = b""
    while b"\n" not in line and len(line) < ANSWER:
        call.settimeout(max(0.01, deadline - time.monotonic()))
        part = call.recv(4096)
        if not part or time.monotonic() > deadline:
            return b""
        line += part
    return line.partition(b"\n")[0]


def _send(call: socket.socket, record: Mapping[str, object]) -> None:
    with contextlib.suppress(OSError):
        call.sendall(json.dumps(record).encode() + b"\n")


def _record(line: bytes) -> dict[str, Any]:
    """The JSON object in a line, or {}."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _reply(token: str) -> str:
    """What only a process 0 with the same token answers."""
    return hashlib.sha256(f"answer {token}".encode()).hexdigest()


def _late(waiting: Collection[int], spec: ProcessSpec, timeout: float) -> str:
    return (
        f"process {spec.process} of {spec.processes}: after {timeout:.0f} s, processes {names(waiting)} of "
        f"0..{spec.processes - 1} did not reach {spec.coordinator}; {CAUSES}"
    )


def names(processes: Collection[int]) -> str:
    shown = sorted(processes)
    return ", ".join(map(str, shown[:16])) + (f" and {len(shown) - 16} more" if len(shown) > 16 else "")


def say(spec: ProcessSpec, text: str) -> None:
    print(f"process {spec.process} of {spec.processes}: {text}", flush=True)
