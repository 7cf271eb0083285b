"""Errors that say what was given, why it cannot work and what to do next."""


class TightlipError(Exception):
    """Anything tightlip refuses on purpose."""


class UsageError(TightlipError):
    """The input or the flags cannot work. The command line prints the line and exits 2."""


class DamagedError(UsageError):
    """A file that tightlip wrote is not what it was."""


class GuaranteeError(TightlipError):
    """Going on would print a guarantee that is not true."""
