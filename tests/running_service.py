"""The service in a process of its own, and sites that talk to it over real sockets."""

import contextlib
import itertools
import os
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import torch

from fedcomposite.federation import wire
from fedcomposite.federation.engines import (
    connection,
    pki,
    signing,
)
from fedcomposite.federation.engines.grid import ServiceEngine
from fedcomposite.federation.folders import SiteFolder
from fedcomposite.federation.site.site import Limits

PATIENCE = 300.0  # seconds after which a test gives up; none depends on how long something takes


def until(what, timeout=PATIENCE):
    """Wait for something to become true."""
    end = time.monotonic() + timeout
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


class Running:
    """The service in a process of its own."""

    def __init__(self, fed, *extra, **environment):
        self.fed, self.log = fed, fed.path.parent / "serve.log"
        command = [sys.executable, "-m", "fedcomposite", "federation", "serve", str(fed.path), *extra]
        with self.log.open("ab") as file:
            self.began = file.tell()
            self.process = subprocess.Popen(
                command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, stdout=file, stderr=file
            )
        until(lambda: "serving on" in self.said() or self.process.poll() is not None)

    def said(self):
        return self.log.read_bytes()[self.began :].decode()

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(PATIENCE)

    def memory(self):
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024


class Caller:
    """A site's side of the protocol, by hand."""

    def __init__(self, fed, name, key=None):
        self.fed, self.name = fed, name
        self.key = key or pki.read_private(fed.path / "sites" / name / "site.key")
        context = ssl.create_default_context(cafile=str(fed.authority))
        self.client = httpx.Client(base_url=f"https://{fed.address}", verify=context, timeout=PATIENCE, trust_env=False)
        self.numbers = itertools.count(1)
        self.session = ""

    def __del__(self):
        self.client.close()

    def open(self):
        self.session = self.client.get("/v1/sites/challenge").json()["challenge"]
        return self.call("POST", "open")

    def headers(self, method, what, body=b""):
        path = f"/v1/sites/{what}"
        return signing.request_headers(self.key, self.name, self.session, next(self.numbers), method, path, body)

    def call(self, method, what, body=b""):
        got = self.client.request(method, f"/v1/sites/{what}", content=body, headers=self.headers(method, what, body))
        return got.status_code, got.json() if got.content.startswith(b"{") else got.content


class Echo:
    """A site that answers what it is asked with the same vectors."""

    def __init__(self, name, limits=None):
        self.name, self.limits, self.asked = name, limits or Limits(), []

    def answer(self, content):
        self.asked.append(content)
        return content


@contextlib.contextmanager
def joined(fed, name, port=None, silence=40.0, site=None, folder=None):
    """A site's connection in a thread; it ends when the service ends or refuses it."""
    place = SiteFolder(folder or fed.path / "sites" / name)
    lines, site = [], site or Echo(name)
    address = place.address if port is None else f"127.0.0.1:{port}"
    one = connection.Connection(site, address, place.authority, place.key, place.coordinator, lines.append, silence)
    over, end = threading.Event(), threading.Event()

    def serve():
        try:
            one.serve(end.is_set)
        except connection.RefusedError as error:
            lines.append(str(error))
        over.set()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield site, lines, over
    finally:
        end.set()
        with contextlib.suppress(httpx.HTTPError):  # another session ends the request that is held open
            Caller(fed, name).open()
        thread.join(PATIENCE)


def ask(fed, contents, job="job"):
    """Send each site something, and wait for the replies."""
    grid = ServiceEngine(fed, job)
    try:
        until(lambda: set(grid.present()) >= set(contents))
        names = {order: site for site, order in grid.push({s: wire.encode(c) for s, c in contents.items()}).items()}
        got = {}
        end = time.monotonic() + PATIENCE
        while names and time.monotonic() < end:
            grid.wait(names, 1.0)
            for reply in grid.pull(list(names)):
                got[names.pop(reply.order)] = reply.lost if reply.report is None else wire.decode(reply.report)
        return got
    finally:
        grid.close()


def vectors(n, seed=0):
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return wire.content(order="x", vectors={"x": x})
