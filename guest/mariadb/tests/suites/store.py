# SPDX-License-Identifier: GPL-2.0-only
"""The host's side on this machine: `millrace serve` with one VM that has the module `table`, reached over a
Unix socket and by memory that both share. It is what a VM's server would reach over vsock and a memory device."""
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time

CONFIG = """[daemon]
run_dir = "{folder}/run"
state_dir = "{folder}/state"
[[module]]
name = "table"
path = "{wasm}"
sha256 = "{sha256}"
memory = "1GiB"
[[vm]]
name = "db"
[vm.modules]
use = ["table"]
disk = "4GiB"
socket = "{folder}/run/db.sock"
[vm.modules.ring]
path = "{ring}"
spin_us = {spin_us}
"""
# Memory is in memory.
SHARED = "/dev/shm"
# After this it has failed; nothing waits for it in the good case. The compiler of a debug build is slow.
START_S = 300
STOP_S = 30


class Failed(Exception):
    """The daemon ended, or is silent."""


class Store:
    """A daemon in a folder. `code`: a folder that keeps what was compiled, for the next one."""

    def __init__(self, folder, millrace, wasm, code, spin_us=50):
        self.folder, self.millrace, self.wasm, self.code = folder, millrace, wasm, code
        self.spin_us = spin_us

    def path(self, name):
        return os.path.join(self.folder, name)

    @property
    def address(self):
        return "unix:" + self.path("run/db.sock")

    @property
    def ring(self):
        """One for each folder."""
        name = hashlib.sha256(self.folder.encode()).hexdigest()[:16]
        return os.path.join(SHARED, "millrace-suites-%s.ring" % name)

    @property
    def pid(self):
        """Of the daemon, while it lives. One that was just started may not show yet what it runs."""
        try:
            with open(self.path("pid")) as file:
                pid = int(file.read())
            with open("/proc/%d/cmdline" % pid, "rb") as file:
                return pid if self.path("m.toml").encode() in file.read() else None
        except (FileNotFoundError, ProcessLookupError, ValueError):
            return None

    def log(self):
        with open(self.path("log"), errors="replace") as file:
            return file.read()[-4000:]

    def start(self):
        """With nothing in it."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.makedirs(self.path("state"))
        with open(self.wasm, "rb") as file:
            sha256 = hashlib.sha256(file.read()).hexdigest()
        with open(self.path("m.toml"), "w") as file:
            file.write(
                CONFIG.format(
                    folder=self.folder,
                    wasm=self.wasm,
                    sha256=sha256,
                    ring=self.ring,
                    spin_us=self.spin_us,
                )
            )
        if os.path.isdir(self.code):
            shutil.copytree(self.code, self.path("state/code"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.bind(self.path("notify"))
            self.spawn()
            self.wait_ready(notify)
        self.wait_module()
        if not os.path.isdir(self.code):
            # Two that are the first at the same time both may put it there.
            part = "%s.%d" % (self.code, os.getpid())
            shutil.copytree(self.path("state/code"), part)
            try:
                os.rename(part, self.code)
            except OSError:
                shutil.rmtree(part)

    def spawn(self):
        """In a session of its own: whoever ends the server beside it does not end it."""
        env = dict(os.environ, NOTIFY_SOCKET=self.path("notify"))
        env.pop("LD_LIBRARY_PATH", None)
        with open(self.path("log"), "ab") as log:
            self.daemon = subprocess.Popen(
                [self.millrace, "serve", "-c", self.path("m.toml")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
                cwd="/",
            )
        with open(self.path("pid"), "w") as file:
            file.write("%d\n" % self.daemon.pid)

    def wait_ready(self, notify):
        notify.settimeout(1)
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.daemon.poll() is None:
            try:
                if b"READY=1" in notify.recv(1024):
                    return
            except socket.timeout:
                pass
        raise Failed("the daemon is not ready:\n" + self.log())

    def wait_module(self):
        """It is compiled and reads its files while the daemon is ready already."""
        until = time.monotonic() + START_S
        command = [self.millrace, "module", "ls", "--json", "--socket", self.path("run/control.sock")]
        while time.monotonic() < until and self.daemon.poll() is None:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            if done.returncode == 0 and [m["state"] for m in json.loads(done.stdout)] == ["running"]:
                return
            time.sleep(0.05)
        raise Failed("the module does not run:\n" + self.log())

    def stop(self):
        pid = self.pid
        if not pid:
            return
        os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + STOP_S
        while self.pid:
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
            try:  # whoever started it must take its end
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass
        if os.path.exists(self.ring):
            os.unlink(self.ring)
