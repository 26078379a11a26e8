# SPDX-License-Identifier: GPL-2.0-only
"""Random conditions on random tables: MILLRACE with conditions that the host checks, MILLRACE without, and InnoDB
must say the same. The seeds are fixed, so what failed fails again."""
import random
import re
import subprocess
import sys

import bench
import packages
import random_conditions

QUERIES = 25  # of a table
HINT = re.compile(r" (?:FORCE|IGNORE) INDEX \([^)]*\)")
# name: engine, what its session begins with
WAYS = {
    "on": ("MILLRACE", "SET millrace_condition_pushdown=ON"),
    "off": ("MILLRACE", "SET millrace_condition_pushdown=OFF"),
    "InnoDB": ("InnoDB", ""),
}


def script(way, creates, queries):
    engine, begin = WAYS[way]
    database = "conditions_" + way
    lines = ["DROP DATABASE IF EXISTS %s; CREATE DATABASE %s; USE %s" % ((database,) * 3)]
    lines += ["SET NAMES utf8mb4", "SET sql_mode='', timestamp=1577836800, @v=5", begin]
    # Of a partitioned table the server itself may crash with these, where an engine reads ranges in its own way: if
    # no key of a join buffer is in a partition that is read, it takes one that does not exist.
    if "PARTITION" not in creates[0] or engine == "MILLRACE":
        lines += ["SET SESSION optimizer_switch='mrr=on,mrr_sort_keys=on', join_cache_level=6"]
    lines += [c.replace("=ENGINE", "=" + engine) for c in creates]
    for n, statements in enumerate(queries):
        lines += ["SELECT '#%d'" % n] + statements
    return ";\n".join(line for line in lines if line) + ";\n"


def say(server, text):
    """What the statements print, by query: lines in no order of their own."""
    command = [server.inside("usr/bin/mariadb"), "--no-defaults", "-uroot", "-S", server.socket, "-f", "-n", "-NB"]
    done = subprocess.run(
        command, input=text.encode(), env=server.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120
    )
    said, now = {}, -1
    for line in done.stdout.decode("latin1").splitlines():
        if line.startswith("#") and line[1:].isdigit():
            now = int(line[1:])
            said[now] = []
            continue
        if line.startswith("ERROR"):
            line = " ".join(line.split()[:2])
        said.setdefault(now, []).append(line)
    return {n: sorted(lines) for n, lines in said.items()}


def answers_of(server, creates, queries):
    """What each way says, for each query."""
    said = {way: say(server, script(way, creates, queries)) for way in WAYS}
    if any(-1 in lines for lines in said.values()):
        errors = {way: [line for line in lines.get(-1, []) if "ERROR" in line] for way, lines in said.items()}
        raise packages.Missing("%s: %s" % (creates[0], errors))
    return [{way: lines.get(n) for way, lines in said.items()} for n in range(len(queries))]


def is_same(answers):
    return answers["on"] is not None and answers["on"] == answers["off"] == answers["InnoDB"]


def is_by_plan(server, table, creates, queries, n):
    """The server itself answers some conditions by the key that it takes (of a time that the column would round, it
    finds the rounded one). Then it is the engines' plans that differ, and not what they say without those keys."""
    table.keys = []
    plain = [[HINT.sub("", s) for s in statements] for statements in queries]
    return is_same(answers_of(server, [table.create(), creates[1]], plain)[n])


def round_of(server, seed, counts):
    rng = random.Random(seed)
    table = random_conditions.Table(rng)
    creates = [table.create(), table.inserts(rng)]
    queries = [random_conditions.query(rng, table) for _ in range(QUERIES)]
    for n, answers in enumerate(answers_of(server, creates, queries)):
        counts["queries"] += 1
        counts["filled"] += bool(answers["on"])
        if is_same(answers):
            continue
        if answers["on"] == answers["off"] and is_by_plan(server, table, creates, queries, n):
            counts["by plan"] += 1
            continue
        counts["wrong"] += 1
        print("seed %d, query %d:\n  %s\n  %s" % (seed, n, ";\n  ".join(creates), ";\n  ".join(queries[n])))
        for way, lines in answers.items():
            print("  %-6s %s" % (way, lines if lines is None or len(lines) < 20 else lines[:20] + ["…"]))
        sys.stdout.flush()


def run(runner, seed, rounds):
    """Whether anything failed."""
    counts = {"queries": 0, "filled": 0, "by plan": 0, "wrong": 0}
    with bench.Server(runner) as server:
        for n in range(seed, seed + rounds):
            round_of(server, n, counts)
        filtered = server.counter("Millrace_filtered_reads")
    print(
        "conditions: {queries} queries of %d tables, {filled} with rows; %d reads had a filter; "
        "{by plan} have other plans on InnoDB; {wrong} differ".format(**counts) % (rounds, filtered)
    )
    if not filtered:
        raise packages.Missing("no read had a filter: this has compared nothing")
    return bool(counts["wrong"])
