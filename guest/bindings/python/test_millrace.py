"""Tests with an agent that moves the bytes itself.

A test of guest/agent runs them with the library.
"""

import asyncio
import contextlib
import errno
import faulthandler
import os
import selectors
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import unittest

import millrace

REQUEST = struct.Struct("<IHHIIQQQ")
ANSWER = struct.Struct("<IHHIIQ")
MAGIC = int.from_bytes(b"MLRP", "little")
OWN_POSITION = 2**64 - 1
PIPE, QUERY = 1, 2
COMPLETE, CANCELLED, TIMED_OUT, LOST, NO_LEASE, END_OF_FILE, NO_AGENT = 0, 1, 2, 53, 85, 88, 98
WANT = bytes(at * 2654435761 >> 24 & 255 for at in range(300001))


class Agent:
    """Agent that moves all bytes, or answers as told: a reason, a most count, "hold" or "die"."""

    def __init__(self, folder):
        self.reset()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.path = os.path.join(folder, "agent")
        self.listener.bind(self.path)
        self.listener.listen()
        threading.Thread(target=self.accept, daemon=True).start()

    def reset(self):
        self.says, self.asked, self.min_kib = [], [], 0
        self.held, self.cancelled = threading.Event(), threading.Event()

    def accept(self):
        while True:
            program = self.listener.accept()[0]
            threading.Thread(target=self.serve, args=(program,), daemon=True).start()

    def serve(self, program):
        with program:
            while True:
                data, fds, _, _ = socket.recv_fds(program, REQUEST.size + 1, 2)
                if len(data) != REQUEST.size:
                    break
                magic, version, op, flags, timeout, source, sink, count = REQUEST.unpack(data)
                assert (magic, version, flags) == (MAGIC, 1, 0)
                if op == QUERY:
                    program.send(ANSWER.pack(MAGIC, 1, COMPLETE, 0, self.min_kib, 0))
                    continue
                self.asked.append((source, sink, count, timeout))
                said = self.says.pop(0) if self.says else count
                try:
                    answer = self.pipe(program, said, fds, (source, sink), count)
                finally:
                    for fd in fds:
                        os.close(fd)
                if answer is None:
                    break
                # A program that has cancelled may have gone.
                with contextlib.suppress(BrokenPipeError):
                    program.send(answer)

    def pipe(self, program, said, fds, places, count):
        if said == "die":
            return None
        if said == "hold":
            self.held.set()
            assert program.recv(1) == b""
            self.cancelled.set()
            return ANSWER.pack(MAGIC, 1, CANCELLED, 125, 0, 0)
        if isinstance(said, tuple):
            return ANSWER.pack(MAGIC, 1, said[0], said[1], 0, 0)
        moved, at = 0, list(places)
        for end in range(2):
            if not sock(fds[end]) and at[end] == OWN_POSITION:
                at[end] = os.lseek(fds[end], 0, os.SEEK_CUR)
        while moved < min(said, count):
            want = min(said, count, moved + 65536) - moved
            part = os.read(fds[0], want) if sock(fds[0]) else os.pread(fds[0], want, at[0] + moved)
            if not part:
                break
            if sock(fds[1]):
                with socket.socket(fileno=os.dup(fds[1])) as connection:
                    connection.sendall(part)
            else:
                os.pwrite(fds[1], part, at[1] + moved)
            moved += len(part)
        for end in range(2):
            if not sock(fds[end]) and places[end] == OWN_POSITION:
                os.lseek(fds[end], at[end] + moved, os.SEEK_SET)
        reason = COMPLETE if moved == count else END_OF_FILE if said == count else TIMED_OUT
        return ANSWER.pack(MAGIC, 1, reason, 0, 0, moved)


def sock(fd):
    return stat.S_ISSOCK(os.fstat(fd).st_mode)


def tcp():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return listener.accept()[0], client


class Tests(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        """One agent: the library keeps its connections. Nothing waits for ever."""
        faulthandler.dump_traceback_later(120, exit=True)
        cls.addClassCleanup(faulthandler.cancel_dump_traceback_later)
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.agent = Agent(folder.name)
        os.environ["MILLRACE_AGENT_SOCKET"] = cls.agent.path

    def setUp(self):
        folder = self.enterContext_(tempfile.TemporaryDirectory())
        self.agent.reset()
        self.source = self.enterContext_(open(os.path.join(folder, "a"), "w+b", buffering=0))
        self.source.write(WANT)
        self.source.seek(0)
        self.sink = self.enterContext_(open(os.path.join(folder, "b"), "w+b", buffering=0))

    def enterContext_(self, manager):
        """unittest has it from Python 3.11 on."""
        value = manager.__enter__()
        self.addCleanup(manager.__exit__, None, None, None)
        return value

    def tcp(self):
        return [self.enterContext_(end) for end in tcp()]

    def got(self, at, count):
        return os.pread(self.sink.fileno(), count, at)

    def test_all_pairs(self):
        pipe = millrace.pipe
        self.assertEqual(pipe(self.sink, self.source, 1000, in_offset=5, out_offset=7), 1000)
        self.assertEqual(self.got(7, 2000), WANT[5:1005])
        self.assertEqual((self.source.tell(), self.sink.tell()), (0, 0))
        self.assertEqual(pipe(self.sink.fileno(), self.source.fileno(), 2**62), len(WANT))
        self.assertEqual((self.source.tell(), self.sink.tell()), (len(WANT), len(WANT)))
        self.assertEqual(self.got(0, 2**20), WANT)
        self.assertEqual(pipe(self.sink, self.source, 1), 0)
        (server, client), (onward, last) = self.tcp(), self.tcp()
        self.assertEqual(pipe(server, self.source, 50000, in_offset=1, timeout=7.0001), 50000)
        self.assertEqual(pipe(onward, client, 20000), 20000)
        self.assertEqual(pipe(self.sink, client, 30000, out_offset=3), 30000)
        self.assertEqual(last.recv(20000, socket.MSG_WAITALL), WANT[1:20001])
        self.assertEqual(self.got(3, 30000), WANT[20001:50001])
        own = OWN_POSITION
        self.assertEqual(self.agent.asked[0], (5, 7, 1000, 0))
        self.assertEqual(self.agent.asked[3:], [
            (1, own, 50000, 7001), (own, own, 20000, 0), (own, 3, 30000, 0)])

    def test_reasons(self):
        self.agent.says = [(NO_LEASE, 11), 10, "die", (TIMED_OUT, 110)]
        pipe = lambda: millrace.pipe(self.sink, self.source, 100, in_offset=0)
        with self.assertRaises(millrace.NotPiped) as caught:
            pipe()
        error = caught.exception
        self.assertIsInstance(error, OSError)
        self.assertEqual((error.errno, error.reason, error.may_fall_back), (11, NO_LEASE, True))
        self.assertEqual(error.reason_text, "somebody has the file open for writing")
        self.assertEqual(pipe(), 10)
        for reason in LOST, TIMED_OUT:
            with self.assertRaises(millrace.NotPiped) as caught:
                pipe()
            self.assertEqual(caught.exception.reason, reason)
            self.assertFalse(caught.exception.may_fall_back)
        self.assertEqual(len(self.agent.asked), 4)

    def test_arguments(self):
        for wrong in ({"in_offset": -1}, {"out_offset": 2**63}, {"timeout": -0.1}):
            for call in millrace.pipe, millrace.start:
                with self.assertRaises(ValueError):
                    call(self.sink, self.source, 1, **wrong)
        with self.assertRaises(ValueError):
            millrace.pipe(self.sink, self.source, -1)
        with self.assertRaises(millrace.NotPiped) as caught:
            millrace.pipe(1000, self.source, 1)
        self.assertEqual(caught.exception.errno, errno.EBADF)
        self.assertEqual(self.agent.asked, [])

    def test_what_is_offered(self):
        self.assertTrue(millrace.available())
        self.assertIsNone(millrace.min_bytes())
        self.agent.min_kib = 192
        self.assertEqual(millrace.min_bytes(), 192 << 10)
        environ = {**os.environ, "MILLRACE_AGENT_SOCKET": self.agent.path + "x"}
        script = "import millrace; assert not millrace.available(); millrace.pipe(0, 0, 1)"
        command = [sys.executable, "-c", script]
        told = subprocess.run(command, capture_output=True, text=True, env=environ)
        self.assertIn("no agent runs in this guest", told.stderr)

    def test_without_the_library(self):
        script = """if 1:
            import millrace
            assert not millrace.available() and millrace.min_bytes() is None
            for call in millrace.pipe, millrace.start:
                try:
                    call(0, 1, 2)
                except millrace.NotPiped as error:
                    assert error.may_fall_back and error.reason == 98 and error.errno == 95
                else:
                    raise SystemExit(1)
        """
        environ = {**os.environ, "LD_LIBRARY_PATH": ""}
        subprocess.run([sys.executable, "-c", script], check=True, env=environ)

    def test_beside_the_program(self):
        self.agent.says = ["hold", 4000]
        with millrace.start(self.sink, self.source, 9) as held:
            self.assertIsNone(held.status())
            self.agent.held.wait()
            with millrace.start(self.sink, self.source, 5000, in_offset=1, out_offset=2) as other:
                with selectors.DefaultSelector() as selector:
                    selector.register(held, selectors.EVENT_READ)
                    selector.register(other, selectors.EVENT_READ)
                    self.assertEqual([key.fileobj for key, _ in selector.select()], [other])
                self.assertEqual([other.status(), other.status()], [4000, 4000])
            self.assertRaises(ValueError, other.fileno)
            self.assertIsNone(held.status())
        self.agent.cancelled.wait()
        self.assertEqual(self.got(2, 9999), WANT[1:4001])

    def test_event_loops(self):
        async def all_of_it():
            begin = lambda: millrace.start(self.sink, self.source, 100, in_offset=0, out_offset=0)
            self.assertEqual(await begin().moved(), 100)
            with self.assertRaises(millrace.NotPiped):
                await begin().moved()
            held = begin()
            with self.assertRaises(asyncio.TimeoutError):
                await asyncio.wait_for(held.moved(), 0.05)
            self.assertRaises(ValueError, held.fileno)

        self.agent.says = [100, (NO_LEASE, 11), "hold"]
        asyncio.run(all_of_it())
        self.agent.cancelled.wait()

    def test_signals(self):
        """A handler runs, and the pipe begins again unless it raises."""
        runs = []
        old = signal.signal(signal.SIGUSR1, lambda *_: runs.append(1))
        self.addCleanup(signal.signal, signal.SIGUSR1, old)
        self.agent.says = ["hold", 100]
        main = threading.get_ident()

        def poke():
            self.agent.held.wait()
            # One may come before the call waits.
            while not self.agent.cancelled.wait(0.02):
                signal.pthread_kill(main, signal.SIGUSR1)

        poking = threading.Thread(target=poke)
        poking.start()
        moved = millrace.pipe(self.sink, self.source, 100, in_offset=0, timeout=60)
        poking.join()
        self.assertEqual(moved, 100)
        self.assertGreater(len(runs), 0)
        self.assertLess(self.agent.asked[1][3], 60001)
        self.assertGreater(self.agent.asked[1][3], 0)


if __name__ == "__main__":
    unittest.main()
