"""What a model gives away: one file per attack.

The package is also the call: `tightlip.audit(model, corpus)` is `tightlip.commands.audit`.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """A function and a package cannot share a name otherwise: importing the package hides it."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from tightlip.commands import audit

        return audit(*arguments, **options)

    @property
    def __signature__(self) -> Any:
        from inspect import signature

        from tightlip.audit.leakage.audit import audit_model

        return signature(audit_model)


sys.modules[__name__].__class__ = _CallablePackage
