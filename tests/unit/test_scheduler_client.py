"""A node's link to the scheduler, against a scripted scheduler."""

from __future__ import annotations

import threading
import time

import zmq

from bpsx.config import Config
from bpsx.errors import RendezvousError
from bpsx.scheduler import messages
from bpsx.scheduler.client import Link
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
                    lanes=[],
                    names={"worker": [], "server": []},
                ),
            ]
        )
        hub.close(1000)
        context.term()

    hub_thread = threading.Thread(target=welcome_and_die)
    hub_thread.start()
    link = Link(
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
