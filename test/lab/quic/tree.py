"""Makes a tree for guests: this Python, its library and some packages, compiled.

Arguments: the tree, the pip wheel, the list of packages.
"""

import compileall
import pathlib
import shutil
import subprocess
import sys
import sysconfig

# What no test needs is half of the library.
LEFT_OUT = shutil.ignore_patterns(
    "__pycache__", "config-*", "distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data",
    "sitecustomize.py", "test", "tkinter", "turtledemo", "*test*.so",
)

tree, pip, packages = sys.argv[1:]
inside = lambda path: pathlib.Path(tree, path.lstrip("/"))

library = sysconfig.get_path("stdlib")
shutil.copytree(library, inside(library), ignore=LEFT_OUT)
program = inside("/usr/bin/python3")
program.parent.mkdir()
shutil.copy(sys.executable, program)

# Debian's Python looks here.
command = [sys.executable, f"{pip}/pip", "install", "--quiet", "--root-user-action=ignore"]
command += ["--only-binary=:all:", "--no-deps", "--no-compile", "--require-hashes"]
command += ["--target", inside("/usr/lib/python3/dist-packages"), "--requirement", packages]
subprocess.run(command, check=True)

# A slow guest does not compile, and an image's files have no times that could be compared.
if not compileall.compile_dir(tree, quiet=1, legacy=True, stripdir=tree, prependdir="/"):
    sys.exit("some file does not compile")
for source in pathlib.Path(tree).rglob("*.py"):
    source.unlink()
