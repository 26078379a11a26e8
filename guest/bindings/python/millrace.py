"""Pipes for programs in a guest: the host moves bytes between files and TCP connections.

The bytes do not pass through the virtual machine.

    import millrace, os

    def send(connection, file, count):
        sent = 0
        while sent < count:
            try:
                moved = millrace.pipe(connection, file, count - sent, in_offset=sent)
            except millrace.NotPiped as error:
                if not error.may_fall_back:
                    raise
                moved = os.sendfile(connection.fileno(), file.fileno(), sent, count - sent)
            if moved == 0:
                break
            sent += moved
        return sent

All pairs of files and sockets can be piped; millrace_pipe(3) describes them. This binding calls
libmillrace.so.1. Where that is not installed nothing is piped, and programs go on as without it.
"""

import ctypes
import errno
import math
import os
import time

__all__ = ["NotPiped", "Pipe", "available", "min_bytes", "pipe", "start"]
__version__ = "0.1.0"

_OWN_POSITION = -1
# Numbers of millrace-reasons.h.
_CANCELLED = 1
_NO_AGENT = 98
# Largest size_t that is also an offset.
_MAX_COUNT = 2**63 - 1
_MAX_TIMEOUT_MS = 2**32 - 1


class _Options(ctypes.Structure):
    """struct millrace_options"""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("timeout_ms", ctypes.c_uint32),
        ("in_offset", ctypes.c_int64),
        ("out_offset", ctypes.c_int64),
    ]


class _Result(ctypes.Structure):
    """struct millrace_result"""

    _fields_ = [
        ("moved", ctypes.c_int64),
        ("error", ctypes.c_int32),
        ("reason", ctypes.c_int32),
    ]


def _load():
    try:
        library = ctypes.CDLL("libmillrace.so.1", use_errno=True)
    except OSError:
        return None
    options = ctypes.POINTER(_Options)
    call = [ctypes.c_int, ctypes.c_int, ctypes.c_size_t, options]
    library.millrace_pipe_options.argtypes = call
    library.millrace_pipe_options.restype = ctypes.c_int64
    library.millrace_pipe_start.argtypes = call
    library.millrace_pipe_status.argtypes = [ctypes.c_int, ctypes.POINTER(_Result)]
    library.millrace_min_bytes.argtypes = []
    library.millrace_min_bytes.restype = ctypes.c_int64
    library.millrace_reason_text.argtypes = [ctypes.c_int]
    library.millrace_reason_text.restype = ctypes.c_char_p
    library.millrace_may_fall_back.argtypes = [ctypes.c_int]
    return library


_library = _load()


class NotPiped(OSError):
    """Error of a pipe that moved nothing.

    reason: its number, as in millrace.h; reason_text: for people; may_fall_back: whether the
    ordinary calls may be tried instead. If not, the time limit was over, or the number of bytes
    that arrived is not known: close the connection then.
    """

    def __init__(self, number, reason):
        if _library:
            text = _library.millrace_reason_text(reason).decode()
            may_fall_back = bool(_library.millrace_may_fall_back(reason))
        else:
            text, may_fall_back = "no libmillrace in this guest", True
        super().__init__(number, text)
        self.reason = reason
        self.reason_text = text
        self.may_fall_back = may_fall_back


def _fd(end):
    return end if isinstance(end, int) else end.fileno()


def _place(offset):
    if offset is None:
        return _OWN_POSITION
    if not 0 <= offset <= _MAX_COUNT:
        raise ValueError("an offset out of range")
    return offset


def _milliseconds(timeout):
    if timeout is None:
        return 0
    if timeout < 0:
        raise ValueError("a negative timeout")
    # 0 would mean no limit.
    return min(max(math.ceil(timeout * 1000), 1), _MAX_TIMEOUT_MS) if math.isfinite(timeout) else 0


def _options(count, in_offset, out_offset, timeout):
    if not 0 <= count <= _MAX_COUNT:
        raise ValueError("a count out of range")
    places = _place(in_offset), _place(out_offset)
    return _Options(ctypes.sizeof(_Options), _milliseconds(timeout), *places)


def _need_library():
    if _library is None:
        raise NotPiped(errno.EOPNOTSUPP, _NO_AGENT)
    return _library


def _begin(call, out, in_, count, options):
    """Calls the library; returns its result, the errno and the reason."""
    result = call(_fd(out), _fd(in_), count, ctypes.byref(options))
    return result, ctypes.get_errno(), _library.millrace_reason()


def pipe(out, in_, count, in_offset=None, out_offset=None, timeout=None):
    """Moves up to count bytes from in_ to out and returns their number.

    It may be less than count; it is 0 at the end of a file. Both ends are descriptors or have a
    fileno(). Offsets are of files, in bytes; without one the descriptor's own position is used and
    advances (not that of a buffering file object). The timeout is in seconds; after it the bytes
    moved so far are the result. Raises NotPiped when nothing was moved and there was a reason.
    """
    options = _options(count, in_offset, out_offset, timeout)
    library = _need_library()
    until = None if timeout is None else time.monotonic() + timeout
    while True:
        moved, number, reason = _begin(library.millrace_pipe_options, out, in_, count, options)
        if moved >= 0:
            return moved
        # As in all calls of Python: the handler has run before the next line, and did not raise.
        if reason != _CANCELLED or number != errno.EINTR:
            raise NotPiped(number, reason)
        if until is not None:
            options.timeout_ms = _milliseconds(max(until - time.monotonic(), 0))


class Pipe:
    """Pipe that runs beside the program: see start()."""

    def __init__(self, fd):
        self._descriptor = fd
        self._result = None

    def fileno(self):
        """Descriptor that is readable when the pipe is over: for select, selectors and asyncio."""
        if self._descriptor < 0:
            raise ValueError("the pipe is closed")
        return self._descriptor

    def status(self):
        """Returns None while it runs, then the number of bytes moved, or raises NotPiped."""
        if self._result is None:
            result = _Result()
            got = _library.millrace_pipe_status(self.fileno(), ctypes.byref(result))
            if got < 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
            if got == 0:
                return None
            self._result = result
        if self._result.moved == 0 and self._result.error != 0:
            raise NotPiped(self._result.error, self._result.reason)
        return self._result.moved

    async def moved(self):
        """Waits in an event loop; returns the number of bytes moved, or raises NotPiped.

        Closes the pipe when cancelled.
        """
        import asyncio

        loop, fd = asyncio.get_running_loop(), self.fileno()
        over = loop.create_future()
        loop.add_reader(fd, lambda: over.done() or over.set_result(None))
        try:
            await over
        except asyncio.CancelledError:
            loop.remove_reader(fd)
            self.close()
            raise
        loop.remove_reader(fd)
        return self.status()

    def close(self):
        """Closes the descriptor; cancels the pipe, unless it is over."""
        fd, self._descriptor = self._descriptor, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        self.close()


def start(out, in_, count, in_offset=None, out_offset=None, timeout=None):
    """Begins a pipe without ever waiting, and returns a Pipe.

    Arguments are pipe()'s; both ends may be closed at once. Raises NotPiped when it could not
    begin.
    """
    options = _options(count, in_offset, out_offset, timeout)
    library = _need_library()
    fd, number, reason = _begin(library.millrace_pipe_start, out, in_, count, options)
    if fd < 0:
        raise NotPiped(number, reason)
    return Pipe(fd)


def available():
    """Whether the host offers pipes now."""
    return _library is not None and bool(_library.millrace_available())


def min_bytes():
    """Returns the break-even size of pipes in this guest in bytes; None: not known."""
    return (_library.millrace_min_bytes() if _library else 0) or None
