# SPDX-License-Identifier: GPL-2.0-only
"""MariaDB's server and tests of the very version that the plugin was made for, unpacked and not installed."""
import os
import shutil
import subprocess

OF_VERSION = [
    "mariadb-server-core",
    "mariadb-server",
    "mariadb-client-core",
    "mariadb-client",
    "mariadb-common",
    "mariadb-test",
    "mariadb-test-data",
]
# Libraries of the server and of sysbench that a system without a database lacks.
OTHERS = ["libaio1", "libnuma1", "liburing2", "libmariadb3", "libluajit-5.1-2", "sysbench"]
LIBRARIES = "usr/lib/x86_64-linux-gnu"
TESTS = "usr/share/mysql/mysql-test"
SERVER = "usr/sbin/mariadbd"

# The wrapper calls the server by this name.
REAL_SERVER = SERVER + ".real"


class Missing(Exception):
    """Something that has to be there is not; says what makes it."""


def run(command, **more):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more)
    if done.returncode != 0:
        text = done.stdout.decode("utf8", "replace")[-2000:]
        raise Missing("failed: %s\n%s" % (" ".join(command), text))


def version_of(top):
    """The version that the plugin is for."""
    try:
        with open(os.path.join(top, "target/mariadb/version")) as file:
            return file.read().strip()
    except FileNotFoundError:
        raise Missing("there is no plugin: run scripts/mariadb-plugin") from None


def unpacked(top):
    """The folder with the packages' files; fetched once for each version."""
    version = version_of(top)
    root = os.path.join(top, "target/mariadb", version.split(":")[-1], "suites")
    if os.path.exists(os.path.join(root, ".complete")):
        return root
    shutil.rmtree(root, ignore_errors=True)
    packages = os.path.join(root, "packages")
    os.makedirs(packages)
    names = ["%s=%s" % (name, version) for name in OF_VERSION] + OTHERS
    apt = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download"]
    try:
        run(apt + names, cwd=packages)
    except Missing:
        run(["apt-get", "-q", "update"])
        run(apt + names, cwd=packages)
    for name in sorted(os.listdir(packages)):
        run(["dpkg-deb", "-x", os.path.join(packages, name), root])
    shutil.rmtree(packages)
    os.rename(os.path.join(root, SERVER), os.path.join(root, REAL_SERVER))
    with open(os.path.join(root, ".complete"), "w"):
        pass
    return root


def environment(root):
    """With the libraries that were unpacked."""
    env = dict(os.environ)
    env["LD_LIBRARY_PATH"] = os.path.join(root, LIBRARIES)
    return env


def add_plugin(top, root):
    """The plugin as it is now."""
    plugin = os.path.join(top, "target/mariadb/ha_millrace.so")
    if not os.path.exists(plugin):
        raise Missing("there is no plugin: run scripts/mariadb-plugin")
    shutil.copy(plugin, os.path.join(root, "usr/lib/mysql/plugin"))


def drop_combinations(root):
    """These suites run with InnoDB and with MyISAM; here the engine is said from outside."""
    for suite in ("engines/funcs", "engines/iuds"):
        path = os.path.join(root, TESTS, "suite", suite, "combinations")
        if os.path.exists(path):
            os.remove(path)


def add_overlays(root):
    """The suite `storage_engine` asks each engine for a file that says its name. Those of other engines go,
    with what they expect."""
    folder = os.path.join(root, TESTS, "plugin")
    with open(os.path.join(root, TESTS, "suite/storage_engine/define_engine.inc")) as file:
        template = file.read()
    shutil.rmtree(folder, ignore_errors=True)
    for overlay, engine in (("millrace", "MILLRACE"), ("control", "InnoDB")):
        for part in ("", "trx", "parts"):
            place = os.path.join(folder, overlay, "storage_engine", part)
            os.makedirs(place)
            # mysql-test-run leaves out an overlay that changes nothing.
            with open(os.path.join(place, "suite.opt"), "w") as file:
                file.write("--innodb-lock-wait-timeout=1\n" if part == "trx" else "--innodb\n")
        with open(os.path.join(folder, overlay, "storage_engine/define_engine.inc"), "w") as file:
            file.write(template.replace("# let $ENGINE =;", "let $ENGINE = %s;" % engine))


def allow_warnings(root):
    """What a server says of any plugin that is not as mature as itself."""
    path = os.path.join(root, TESTS, "include/mtr_warnings.sql")
    with open(path, encoding="latin1") as file:
        text = file.read()
    first = "INSERT INTO global_suppressions VALUES\n"
    ours = ' ("Plugin .MILLRACE. is of maturity level"),\n'
    if ours not in text:
        with open(path, "w", encoding="latin1") as file:
            file.write(text.replace(first, first + ours))


def add_server(root):
    """In the server's place: a program that gives each server a store of its own."""
    here = os.path.dirname(os.path.abspath(__file__))
    path = os.path.join(root, SERVER)
    with open(path, "w") as file:
        file.write('#!/bin/sh\nexec "%s" "%s.real" "$@"\n' % (os.path.join(here, "server"), path))
    os.chmod(path, 0o755)


def tree(top):
    """All of it, ready for mysql-test-run."""
    root = unpacked(top)
    add_plugin(top, root)
    drop_combinations(root)
    add_overlays(root)
    allow_warnings(root)
    add_server(root)
    return root
