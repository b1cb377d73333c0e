"""TCP proxies: one that misbehaves, as a bad network does, and one as hospitals have them (CONNECT)."""

import asyncio
import contextlib
import random
import socket
import struct
import threading


class Proxy:
    """Passes connections on to a local port; its attributes can be changed while it runs.

    ``delay`` is in seconds and for every piece; ``resets`` is the chance that a piece resets its connection instead of
    arriving; ``rate`` is in bytes per second towards the target; while ``cut`` nothing passes and nobody is told, as
    with an unplugged cable. ``broken``, ``passed`` and ``lost`` count resets, bytes, and bytes that a cut swallowed.
    """

    def __init__(self, target, delay=0.0, resets=0.0, rate=0.0, seed=0):
        self.target, self.delay, self.resets, self.rate = target, delay, resets, rate
        self.cut, self.broken, self.passed, self.lost = False, 0, 0, 0
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        self._server = self._loop.run_until_complete(asyncio.start_server(self._connect, sock=listening))
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def close(self):
        async def end():
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.05)  # the transports' own goodbyes

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self, reader, writer):
        """The connection to the target."""
        return await asyncio.open_connection("127.0.0.1", self.target)

    async def _connect(self, reader, writer):
        try:
            there = await self._open(reader, writer)
        except (OSError, EOFError, ValueError):
            writer.transport.abort()
            return
        ends = [writer, there[1]]
        try:
            await asyncio.gather(
                self._pump(reader, there[1], ends, up=True), self._pump(there[0], writer, ends, up=False)
            )
        finally:
            for end in ends:
                end.transport.abort()

    async def _pump(self, reader, writer, ends, up):
        with contextlib.suppress(OSError):
            while data := await reader.read(4096 if up and self.rate else 65536):
                await asyncio.sleep(self.delay + (len(data) / self.rate if up and self.rate else 0.0))
                if self.cut:
                    self.lost += len(data)
                    continue
                if self._random.random() < self.resets:
                    self.broken += 1
                    for end in ends:
                        taken = end.get_extra_info("socket")
                        taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        end.transport.abort()
                    return
                writer.write(data)
                await writer.drain()
                self.passed += len(data)
        for end in ends:
            end.transport.abort()


class WebProxy(Proxy):
    """What a hospital has between its machines and the world: connections are asked for with CONNECT."""

    def __init__(self):
        super().__init__(0)
        self.asked = []

    async def _open(self, reader, writer):
        words = (await reader.readuntil(b"\r\n\r\n")).split()
        if words[0] != b"CONNECT":
            raise ValueError("not for this proxy")
        self.asked.append(words[1].decode())
        host, port = self.asked[-1].rsplit(":", 1)
        there = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        return there
