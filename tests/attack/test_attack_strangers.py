"""Strangers at the rendezvous, seeded: bytes of every kind, slow and fast, many at once; the processes still meet."""

import json
import os
import random
import socket
import threading
import time

import pytest

from jaxdiff.training.launchers import ProcessSpec
from jaxdiff.training.rendezvous import rendezvous

pytestmark = pytest.mark.slow
COUNT = int(os.environ.get("JAXDIFF_ATTACKS", "100"))
SEED = int(os.environ.get("JAXDIFF_ATTACK_SEED", "0"))


def payload(draw):
    kind = draw.randrange(6)
    if kind == 0:
        return draw.randbytes(draw.randrange(1, 5000)) + b"\n"
    if kind == 1:
        return b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    if kind == 2:
        return b"%d\n" % draw.randrange(4)
    if kind == 3:
        claim = {"jaxdiff": draw.randbytes(8).hex(), "process": draw.randrange(4), "processes": draw.randrange(1, 4)}
        return json.dumps(claim).encode() + b"\n"
    if kind == 4:
        return b'{"jaxdiff": ' * draw.randrange(1, 200)
    return b""


def disturb(port, draw, ended):
    """One stranger: sends something, at once or byte by byte, and hangs on."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as call:
            data = payload(draw)
            if draw.random() < 0.3:
                for i in range(len(data)):
                    call.sendall(data[i : i + 1])
                    if ended.wait(0.05):
                        return
            else:
                call.sendall(data)
            ended.wait(draw.uniform(0, 2))
    except OSError:
        pass  # turned away


def test_strangers_do_not_keep_processes_from_meeting(capsys):
    draw, met, struck = random.Random(SEED), 0, 0
    while struck < COUNT:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        specs = [ProcessSpec(f"127.0.0.1:{port}", 3, process) for process in range(3)]
        errors, ended = [], threading.Event()

        def take_part(spec, errors=errors):
            try:
                rendezvous(spec, 60.0, "token")
            except (OSError, ValueError) as error:
                errors.append(error)

        first = threading.Thread(target=take_part, args=(specs[0],))
        first.start()
        time.sleep(0.3)
        seeds = [draw.randrange(2**30) for _ in range(min(50, COUNT - struck))]
        strangers = [threading.Thread(target=disturb, args=(port, random.Random(s), ended)) for s in seeds]
        for thread in strangers:
            thread.start()
        struck += len(strangers)
        others = [threading.Thread(target=take_part, args=(spec,)) for spec in specs[1:]]
        for thread in others:
            thread.start()
        for thread in (first, *others):
            thread.join(120)
        ended.set()
        for thread in strangers:
            thread.join(30)
        assert not errors, errors
        met += 1
    with capsys.disabled():
        print(f"\n{struck} strangers at {met} rendezvous: all processes met")
