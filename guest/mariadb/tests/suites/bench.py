# SPDX-License-Identifier: GPL-2.0-only
"""sysbench on MILLRACE and on InnoDB in one server: whether anything fails, that no row is lost, and how fast it
is. The only errors that are no failure are deadlocks, which sysbench's own transactions may have: they are counted."""
import json
import os
import re
import subprocess
import sys
import time

import packages

WORKLOADS = ["oltp_insert", "oltp_read_write", "oltp_point_select"]
THREADS = [1, 4, 16]
ENGINES = ["MILLRACE", "InnoDB"]
TABLES, ROWS = 2, 10000
START_S = 120
# Both engines make each commit durable; InnoDB's own cache holds all rows.
SERVER = [
    "--skip-networking",
    "--innodb-buffer-pool-size=256M",
    "--innodb-flush-log-at-trx-commit=1",
    "--max-connections=100",
    "--plugin-maturity=unknown",
    "--plugin-load-add=ha_millrace.so",
]


class Server:
    """A server with a new data folder and a store."""

    def __init__(self, runner):
        self.runner, self.root, self.work = runner, runner.root, runner.work
        self.env = packages.environment(runner.root)
        self.socket = os.path.join(self.work, "m.sock")
        self.log = os.path.join(runner.out, "sysbench-server.log")

    def inside(self, path):
        return os.path.join(self.root, path)

    def __enter__(self):
        self.store = self.runner.store("bench")
        self.store.start()
        data = os.path.join(self.work, "data")
        common = ["--no-defaults", "--user=root", "--datadir=" + data]
        common += ["--basedir=" + self.inside("usr"), "--lc-messages-dir=" + self.inside("usr/share/mysql")]
        install = [self.inside("usr/bin/mariadb-install-db"), "--auth-root-authentication-method=normal"]
        packages.run(install[:1] + common + install[1:], env=self.env)
        command = [self.inside(packages.REAL_SERVER)] + common + SERVER
        command += ["--socket=" + self.socket, "--plugin-dir=" + self.inside("usr/lib/mysql/plugin")]
        command += ["--millrace-address=" + self.store.address]
        command += ["--millrace-ring=" + (self.runner.by_ring and self.store.ring or "off")]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self.env)
        until = time.monotonic() + START_S
        while self.process.poll() is None and time.monotonic() < until:
            if os.path.exists(self.socket) and self.sql("SELECT 1", False).returncode == 0:
                return self
            time.sleep(0.1)
        with open(self.log, errors="replace") as log:
            raise packages.Missing("the server does not start:\n" + log.read()[-2000:])

    def __exit__(self, kind, *_):
        by_ring = kind is not None or bool(self.counter("Millrace_rings"))
        self.process.terminate()
        self.process.wait()
        self.store.stop()
        if by_ring != self.runner.by_ring and kind is None:
            raise packages.Missing("it went by %s" % (by_ring and "shared memory" or "sockets"))

    def counter(self, name):
        said = self.sql("SHOW GLOBAL STATUS LIKE '%s'" % name).stdout.split()
        return int(said[1]) if len(said) == 2 else 0

    def sql(self, text, is_checked=True):
        command = [self.inside("usr/bin/mariadb"), "--no-defaults", "-uroot", "-S", self.socket]
        command += ["-NB", "-e", text]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True)
        if is_checked and done.returncode != 0:
            raise packages.Missing("%s: %s" % (text, done.stderr))
        return done

    def sysbench(self, workload, engine, threads, seconds, step):
        scripts = self.inside("usr/share/sysbench")
        env = dict(self.env, LUA_PATH=scripts + "/?.lua")
        command = [self.inside("usr/bin/sysbench"), os.path.join(scripts, workload + ".lua")]
        command += ["--mysql-socket=" + self.socket, "--mysql-user=root"]
        command += ["--mysql-db=bench_" + engine.lower()]
        command += ["--mysql-storage-engine=" + engine.lower(), "--mysql-ignore-errors=1213"]
        command += ["--tables=%d" % TABLES, "--table-size=%d" % ROWS, "--threads=%d" % threads]
        # Rows that are deleted come back under their own number, if all numbers are there: AUTO_INCREMENT may
        # leave gaps.
        command += ["--auto_inc=off"] if workload == "oltp_read_write" else []
        command += ["--time=%d" % seconds, step]
        return subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def number(pattern, text):
    found = re.search(pattern, text)
    return float(found.group(1)) if found else 0.0


def rows_of(server, engine):
    tables = ["bench_%s.sbtest%d" % (engine.lower(), i + 1) for i in range(TABLES)]
    return sum(int(server.sql("SELECT COUNT(*) FROM " + t).stdout) for t in tables)


def check(server, engine, workload, transactions):
    """What is wrong with the tables after a run; an insert of sysbench is a transaction."""
    wanted = TABLES * ROWS + (transactions if workload == "oltp_insert" else 0)
    found = rows_of(server, engine)
    if found != wanted:
        return "%d rows, not %d" % (found, wanted)
    for i in range(TABLES):
        said = server.sql("CHECK TABLE bench_%s.sbtest%d" % (engine.lower(), i + 1)).stdout
        if not said.strip().endswith("OK"):
            return said.strip()
    return ""


def run_one(server, workload, engine, threads, seconds):
    server.sql("DROP DATABASE IF EXISTS bench_{0}; CREATE DATABASE bench_{0}".format(engine.lower()))
    prepared = server.sysbench(workload, engine, 1, seconds, "prepare")
    done = server.sysbench(workload, engine, threads, seconds, "run")
    text = done.stdout
    transactions = int(number(r"transactions: +(\d+)", text))
    fault = next((line for line in (prepared.stdout + text).splitlines() if "FATAL" in line), "")
    if not fault and (prepared.returncode or done.returncode or not transactions):
        fault = "sysbench ended with %d: %s" % (done.returncode, text[-300:])
    return {
        "workload": workload,
        "engine": engine,
        "threads": threads,
        "transactions": transactions,
        "per_second": number(r"transactions: .*\(([\d.]+) per sec", text),
        "p95_ms": number(r"95th percentile: +([\d.]+)", text),
        "deadlocks": int(number(r"ignored errors: +(\d+)", text)),
        "fault": fault or check(server, engine, workload, transactions),
    }


def run(runner, seconds):
    """Whether anything failed."""
    results = []
    with Server(runner) as server:
        for workload in WORKLOADS:
            for threads in THREADS:
                for engine in ENGINES:
                    r = run_one(server, workload, engine, threads, seconds)
                    results.append(r)
                    line = "{workload:18} {threads:3} threads  {engine:8} {per_second:10.1f}/s"
                    line += "  p95 {p95_ms:8.2f} ms  {deadlocks} deadlocks  {fault}"
                    print(line.format(**r).rstrip())
                    sys.stdout.flush()
    with open(os.path.join(runner.out, "sysbench.json"), "w") as file:
        json.dump(results, file, indent=1)
        file.write("\n")
    return any(r["fault"] for r in results)
