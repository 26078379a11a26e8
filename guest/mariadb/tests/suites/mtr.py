# SPDX-License-Identifier: GPL-2.0-only
"""Runs suites by mysql-test-run with one engine, and says what became of each test."""
import glob
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field

import packages
from store import Store

WORKERS = 2
TEST_MINUTES = 3
SUITE_MINUTES = 240
# "suite.test 'combination' w1 [ pass ]  12"; the time, or the cause.
LINE = re.compile(r"^(\S+?)\.(\S+)(?: '([^']*)')? +(?:w\d+ )?\[ (\w[\w-]*) \]\s*(.*)$")

COMPLETED = re.compile(r"^Completed: (?:All|Failed \d+/)(?: )?(\d+) tests")


@dataclass
class Suite:
    """`overlay`: the engine's name is in an overlay; else it is the server's default engine."""

    name: str
    overlay: bool
    options: list = field(default_factory=list)


SUITES = [
    Suite("storage_engine", True),
    Suite("storage_engine/trx", True),
    Suite("storage_engine/parts", True, ["--mysqld=--partition"]),
    Suite("engines/iuds", False),
    Suite("engines/funcs", False, ["--mysqld=--partition"]),
]


@dataclass
class Result:
    """status: passed, failed or skipped. said: what the test printed; None: not known. cause: of what did not
    pass."""

    name: str
    status: str
    said: str = None
    cause: str = ""
    seconds: float = 0.0


class Runner:
    """Paths and programs of a run; `work` has a short path, since sockets lie in it."""

    def __init__(self, root, work, millrace, wasm, out, by_ring=True):
        self.root, self.work, self.millrace, self.wasm, self.out = root, work, millrace, wasm, out
        self.by_ring = by_ring
        self.tests = os.path.join(root, packages.TESTS)

    def environment(self, engine, suite):
        env = packages.environment(self.root)
        more = {
            "ENGINE": engine,
            "DEFAULT": "" if suite.overlay else "1",
            "STORES": self.stores(),
            "DAEMON": self.millrace,
            "WASM": self.wasm,
            "RING": "1" if self.by_ring else "",
        }
        env.update({"MILLRACE_SUITES_" + name: value for name, value in more.items()})
        return env

    def stores(self):
        return os.path.join(self.work, "s")

    def command(self, engine, suite, tests, var):
        name = suite.name
        if suite.overlay:
            name += "-millrace" if engine == "MILLRACE" else "-control"
        command = [
            "perl",
            "mariadb-test-run.pl",
            "--force",
            "--max-test-fail=0",
            "--retry=0",
            "--parallel=%d" % WORKERS,
            "--testcase-timeout=%d" % TEST_MINUTES,
            "--suite-timeout=%d" % SUITE_MINUTES,
            "--max-save-datadir=0",
            "--max-save-core=0",
            "--enable-disabled",
            "--vardir=" + var,
            "--suite=" + name,
            "--mysqld=--innodb",
        ]
        return command + suite.options + tests

    def run(self, engine, suite, tests):
        """Results by name. `tests`: these only, if there are any."""
        var = os.path.join(self.work, "v")
        shutil.rmtree(var, ignore_errors=True)
        label = "%s on %s" % (suite.name, engine)
        command = self.command(engine, suite, tests, var)
        log = os.path.join(self.out, label.replace("/", "-").replace(" ", "-") + ".log")
        with open(log, "w") as file:
            process = subprocess.Popen(
                command,
                cwd=self.tests,
                env=self.environment(engine, suite),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                # Its master writes to workers that may just have ended: SIGPIPE stays ignored.
                restore_signals=False,
            )
            reader = Reader(var, lambda result, n: show(label, n, result))
            try:
                for line in process.stdout:
                    file.write(line)
                    reader.read(line)
            finally:
                process.terminate()  # if this is interrupted; it ends its servers then
                code = process.wait()
        if not reader.is_complete():
            with open(log, errors="replace") as file:
                text = file.read()[-2000:]
            raise packages.Missing("mysql-test-run did not run all, and ended with %d:\n%s" % (code, text))
        return reader.results

    def store(self, name):
        code = os.path.join(self.stores(), "code")
        return Store(os.path.join(self.stores(), name), self.millrace, self.wasm, code)

    def stop_stores(self):
        for place in glob.glob(os.path.join(self.stores(), "*", "m.toml")):
            self.store(os.path.basename(os.path.dirname(place))).stop()


class Reader:
    """Reads what mysql-test-run prints: a line for each test, and behind it what was wrong. Its own report comes
    only at the very end."""

    def __init__(self, var, tell):
        self.var, self.tell = var, tell
        self.results = {}
        self.failed = None
        self.begun = ""
        self.completed = -1

    def is_complete(self):
        """Whether it ended as it should, and all that it ran was read."""
        run = [r for r in self.results.values() if r.status != "skipped"]
        return self.completed == len(run)

    def read(self, line):
        # A worker may say something in the middle of a line.
        before, word, _ = line.partition("worker[")
        if word and before:
            self.begun = before
            return
        if not word:
            line, self.begun = self.begun + line, ""
        found = LINE.match(line)
        end = COMPLETED.match(line)
        if end:
            self.completed = int(end.group(1))
        elif found:
            self.begin(*found.groups())
        elif line.startswith(("***Warnings generated", "----", "worker[")):
            self.failed = None
        elif self.failed:
            self.failed.cause += line

    def begin(self, _, name, combination, word, rest):
        status = {"pass": "passed", "fail": "failed"}.get(word, "skipped")
        result = Result(full_name(name, combination), status, said(self.var, name))
        if status == "passed":
            result.seconds = float(rest.split()[0]) / 1000 if rest.strip() else 0.0
        else:
            result.cause = rest + "\n"
        self.results[result.name] = result
        self.failed = result if status == "failed" else None
        self.tell(result, len(self.results))


def show(label, done, result):
    """One line for each test; on a terminal they replace each other, unless a test failed."""
    text = "%s: %d %s %s" % (label, done, result.name, result.status)
    is_terminal = sys.stderr.isatty()
    end = "\r" if is_terminal and result.status != "failed" else "\n"
    sys.stderr.write(("\x1b[K" if is_terminal else "") + text[:150] + end)
    sys.stderr.flush()


def full_name(name, combination):
    """A test may run several times, with one combination of options after the other."""
    return "%s,%s" % (name, ",".join(sorted(combination.split(",")))) if combination else name


def said(var, name):
    """What a test printed, whether it passed or not; the next one of that name writes it anew."""
    for path in glob.glob(os.path.join(var, "*", "log", name + ".log")):
        with open(path, errors="replace") as file:
            return file.read()
    return None
