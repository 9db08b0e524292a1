"""A node's link to the scheduler, against a scripted scheduler."""

from __future__ import annotations

import os
import threading
import time

import pytest
import zmq

from bpsx.config import Config
from bpsx.errors import RendezvousError
from bpsx.scheduler import messages
from bpsx.scheduler.client import SchedulerLink
from bpsx.scheduler.sockets import open_socket


def test_a_link_that_breaks_right_after_the_welcome_is_an_error_at_once():
    """The break may be noticed before or after the welcome is read.

    In both cases the node must not go on as if it could still get messages.
    """
    context = zmq.Context()
    hub = open_socket(context, zmq.ROUTER, Config({}))
    port = hub.bind_to_random_port("tcp://127.0.0.1")

    def welcome_and_die() -> None:
        ident, _ = hub.recv_multipart()
        hub.send_multipart(
            [
                ident,
                messages.encode(
                    "WELCOME",
                    job=1,
                    rank=0,
                    workers=1,
                    servers=[],
                    names={"worker": [], "server": []},
                    elastic=False,
                    may_lose_scheduler=False,
                ),
            ]
        )
        hub.close(1000)
        context.term()

    hub_thread = threading.Thread(target=welcome_and_die)
    hub_thread.start()
    link = SchedulerLink(
        Config(
            {
                "DMLC_ROLE": "worker",
                "DMLC_PS_ROOT_URI": "127.0.0.1",
                "DMLC_PS_ROOT_PORT": str(port),
                "DMLC_NUM_SERVER": "1",
                "BPSX_RENDEZVOUS_TIMEOUT": "60",
            }
        )
    )
    try:
        link.enter_job("worker", 0, "127.0.0.1", [])
        hub_thread.join()
        text = ""
        end = time.monotonic() + 60
        while not text and time.monotonic() < end:
            news = link.news()
            text = news["text"] if news else ""
    except RendezvousError as e:
        text = str(e)
    finally:
        link.stop()
        hub_thread.join()
    assert f"the scheduler at 127.0.0.1:{port} is gone" in text


@pytest.mark.parametrize("rung", [0, 1])
def test_a_term_before_the_start_is_kept_and_each_descriptor_is_watched(rung: int) -> None:
    """The hub sends TERM right after WELCOME, while the worker still waits for replies of lanes."""
    context = zmq.Context()
    hub = open_socket(context, zmq.ROUTER, Config({}))
    port = hub.bind_to_random_port("tcp://127.0.0.1")

    def welcome_and_lose() -> None:
        ident, _ = hub.recv_multipart()
        welcome = {"job": 1, "elastic": True, "may_lose_scheduler": True}
        for kind, fields in (("WELCOME", welcome), ("TERM", {"term": 1, "moves": []})):
            hub.send_multipart([ident, messages.encode(kind, **fields)])

    hub_thread = threading.Thread(target=welcome_and_lose)
    hub_thread.start()
    given = {"root_uri": "127.0.0.1", "root_port": port, "num_server": 2}
    link = SchedulerLink(Config({}, role="worker", rendezvous_timeout=60.0, **given))
    bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
    looked = [threading.Event() for _ in bells]
    handled: list[dict[str, object]] = []
    heard = threading.Event()

    def handle(message: dict[str, object]) -> None:
        handled.append(message)
        heard.set()

    try:
        link.enter_job("worker", 0, "127.0.0.1", [])
        news = None
        end = time.monotonic() + 60
        while news is None and time.monotonic() < end:
            news = link.news()
        assert news is not None and news["type"] == "TERM"
        watch = [(bell, event.set) for bell, event in zip(bells, looked)]
        link.start(handle, lost=lambda text: None, tick=lambda: None, watch=watch)
        assert heard.wait(60)
        assert handled == [news]
        for event in looked:
            event.wait(60)
            event.clear()
        os.eventfd_write(bells[rung], 1)
        assert looked[rung].wait(60)
    finally:
        link.stop()
        hub_thread.join()
        hub.close(0)
        context.term()
        for bell in bells:
            os.close(bell)
