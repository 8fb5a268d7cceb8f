"""The rendezvous of processes: who is late is named, strangers are turned away, and the deadline holds."""

import json
import socket
import threading
import time

import pytest

from jaxdiff.training import rendezvous as module
from jaxdiff.training.launchers import ProcessSpec, find
from jaxdiff.training.rendezvous import Late, rendezvous, token_of


def free_port(family=socket.AF_INET):
    with socket.socket(family) as probe:
        probe.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        return probe.getsockname()[1]


def meet(*specs, timeout=30.0, tokens=("t", "t", "t", "t")):
    """Each spec in a thread; the errors (or None) by place."""
    ended = {}

    def take_part(place):
        try:
            rendezvous(specs[place], timeout, tokens[place])
            ended[place] = None
        except (ValueError, OSError) as error:
            ended[place] = error

    threads = [threading.Thread(target=take_part, args=(place,)) for place in range(len(specs))]
    for thread in threads:
        thread.start()
    return threads, ended


def together(*specs, **how):
    threads, ended = meet(*specs, **how)
    for thread in threads:
        thread.join(60)
    return ended


def at(port, processes, process):
    return ProcessSpec(f"127.0.0.1:{port}", processes, process)


def call(port):
    """A connection, once process 0 listens."""
    for _ in range(200):
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        except OSError:
            time.sleep(0.02)
    raise AssertionError("process 0 does not listen")


def test_those_who_do_not_come_are_named_to_those_who_do(capfd):
    port = free_port()
    ended = together(at(port, 4, 0), at(port, 4, 2), timeout=2.0)
    for place, process in ((0, 0), (1, 2)):
        assert isinstance(ended[place], Late)
        assert f"process {process} of 4: after 2 s, processes 1, 3 of 0..3 did not reach 127.0.0.1:{port}" in str(
            ended[place]
        )
        assert "firewall" in str(ended[place])
    assert "process 0 of 4: at 127.0.0.1" in capfd.readouterr().out


def test_all_come_and_the_port_is_free_again():
    port = free_port()
    assert together(at(port, 3, 2), at(port, 3, 1), at(port, 3, 0)) == {0: None, 1: None, 2: None}
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", port))


def test_process_0_that_is_not_there():
    with pytest.raises(Late, match=r"process 1 of 2: after 0 s, processes 0 of 0..1 did not reach"):
        rendezvous(at(free_port(), 2, 1), 0.3)


def test_ipv6():
    port = free_port(socket.AF_INET6)
    specs = [ProcessSpec(f"[::1]:{port}", 2, process) for process in (0, 1)]
    assert specs[0].address == ("::1", port) and specs[0].coordinator == f"[::1]:{port}"
    assert together(*specs) == {0: None, 1: None}


def test_process_0_listens_at_its_numeric_address_alone():
    port = free_port()
    threads, _ = meet(at(port, 2, 0), timeout=1.0)
    call(port).close()
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", port), timeout=1):
        pass
    threads[0].join(30)


# ------------------------------------------------------------------------------------ strangers


def test_a_byte_now_and_then_does_not_move_the_deadline(monkeypatch):
    """A stranger that never finishes its line is dropped, and never waited for."""
    monkeypatch.setattr(module, "PATIENCE", 0.6)
    port = free_port()
    threads, ended = meet(at(port, 2, 0), timeout=3.0)
    dropped = False
    with call(port) as stranger:
        while threads[0].is_alive():
            try:
                stranger.sendall(b"1")
            except OSError:
                dropped = True
            threads[0].join(0.1)
    assert dropped and isinstance(ended[0], Late)


def test_silent_connections_do_not_lock_a_process_out(monkeypatch):
    monkeypatch.setattr(module, "ROOM", 6)
    port = free_port()
    threads, ended = meet(at(port, 2, 0))
    strangers = [call(port) for _ in range(40)]
    assert together(at(port, 2, 1), timeout=20.0) == {0: None}
    threads[0].join(30)
    assert ended == {0: None}
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(
    "line",
    [
        b"1\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01" + bytes(300) + b"\n",
        b"[" * 5000,
        b"[" * 1000 + b"\n",
        json.dumps({"jaxdiff": "guess", "process": 1, "processes": 2}).encode() + b"\n",
        json.dumps({"jaxdiff": "t", "process": "1", "processes": 2}).encode() + b"\n",
        json.dumps({"jaxdiff": "t", "process": 10**30, "processes": 2}).encode() + b"\n",
    ],
)
def test_nobody_else_stands_in_for_process_1(line):
    port = free_port()
    threads, ended = meet(at(port, 2, 0))
    with call(port) as stranger:
        stranger.sendall(line)
        stranger.settimeout(20)
        try:
            answer = b"".join(iter(lambda: stranger.recv(100), b""))  # until process 0 hangs up
        except ConnectionResetError:
            answer = b""
    assert answer == b"" or b"refused" in answer
    assert threads[0].is_alive()
    assert together(at(port, 2, 1)) == {0: None}
    threads[0].join(30)
    assert ended == {0: None}


def test_nothing_but_presence_is_taken_from_others():
    """Neither side hands over a config, nor anything else that would be used."""
    more = {"config": {"train": {"steps": 1}}, "coordinator": "elsewhere:1"}
    port = free_port()
    threads, ended = meet(at(port, 2, 0))
    with call(port) as other:
        other.sendall(json.dumps({"jaxdiff": "t", "process": 1, "processes": 2, **more}).encode() + b"\n")
        answer = json.loads(other.makefile().readline())
    threads[0].join(30)
    assert ended == {0: None} and set(answer) == {"jaxdiff", "missing"}
    spec = at(free_port(), 2, 1)
    before = dict(vars(spec))
    with socket.create_server(("127.0.0.1", spec.address[1])) as server:
        threads, ended = meet(spec)
        caller, _ = server.accept()
        with caller:
            sent = json.loads(caller.makefile().readline())
            caller.sendall(json.dumps({"jaxdiff": module._reply("t"), "missing": [], **more}).encode() + b"\n")
            threads[0].join(30)
    assert set(sent) == {"jaxdiff", "process", "processes"}
    assert ended == {0: None} and vars(spec) == before


def test_a_server_that_is_not_process_0_is_not_believed(monkeypatch):
    monkeypatch.setattr(module, "LATER", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer():
            for line in (b'{"missing": []}\n', b'{"jaxdiff": "guess", "missing": []}\n', b"[]\n"):
                caller, _ = server.accept()
                caller.sendall(line)
                caller.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(Late, match=r"processes 0 of 0\.\.1 did not reach"):
            rendezvous(at(port, 2, 1), 1.5, "t")


# ------------------------------------------------------------------------------------ processes that differ


def test_another_number_of_processes_is_refused():
    port = free_port()
    ended = together(at(port, 2, 0), at(port, 3, 1), timeout=2.0)
    reason = "process 0 is one of 2 processes, process 1 one of 3"
    assert isinstance(ended[0], ValueError) and "the processes of a run differ" in str(ended[0])
    assert isinstance(ended[1], ValueError) and all(reason in str(ended[place]) for place in (0, 1))


def test_another_config_is_refused():
    port = free_port()
    tokens = [token_of({"seed": seed}, 2) for seed in (0, 1)]
    ended = together(at(port, 2, 0), at(port, 2, 1), timeout=2.0, tokens=tokens)
    for place in (0, 1):
        assert isinstance(ended[place], ValueError)
        assert "process 0 and process 1 have different configs" in str(ended[place])


def test_a_process_that_leaves_is_missing_again():
    """One that was preempted at the rendezvous is not counted as present."""
    port = free_port()
    threads, ended = meet(at(port, 3, 0))
    early = call(port)
    early.sendall(json.dumps({"jaxdiff": "t", "process": 1, "processes": 3}).encode() + b"\n")
    time.sleep(0.5)
    early.close()
    threads_2, ended_2 = meet(at(port, 3, 2))
    time.sleep(0.5)
    assert threads[0].is_alive()
    assert together(at(port, 3, 1)) == {0: None}
    for thread in (*threads, *threads_2):
        thread.join(30)
    assert ended == ended_2 == {0: None}


@pytest.mark.parametrize("name", ["JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "SLURM_NTASKS"])
def test_variables_that_are_not_numbers(name):
    with pytest.raises(ValueError, match=f"environment variable {name} must be an integer, got 'two'"):
        find(environment={name: "two"})
