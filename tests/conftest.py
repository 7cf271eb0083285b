"""Settings for all tests."""

import os

# Tiny models gain nothing from threads, and two test runs on one machine would fight over cores.
# Before torch is imported, so that subprocesses started by tests inherit it too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
