"""Processes of ours beside this one, spoken to through pipes."""

import os
import subprocess
import sys


def begin_child(module: str, **environment: str) -> subprocess.Popen[bytes]:
    """This Python, running a module of ours.

    It ends when its input does, so it need not hear of Ctrl-C.

    Holds:
        same_modules: it imports what this process would, and nothing from the folder that somebody
            stands in. That may be a model's, and its `jinja2.py` would be run.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )
