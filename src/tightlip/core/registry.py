"""Names to import paths, so that listing what exists loads none of it."""

import difflib
from importlib import import_module
from typing import Any

from tightlip.core.errors import UsageError

_REGISTERED: dict[str, dict[str, str]] = {
    "audit": {
        "canaries": "tightlip.audit.canaries.exposure:CanaryAudit",
        "dp-check": "tightlip.audit.dp_check:DPCheckAudit",
        "groups": "tightlip.audit.groups:GroupsAudit",
        "leakage": "tightlip.audit.leakage.audit:LeakageAudit",
        "membership": "tightlip.audit.membership:MembershipAudit",
    },
    "engine": {
        "local": "tightlip.engines.local:LocalEngine",
        "ray": "tightlip.engines.ray:RayEngine",
    },
    "mitigation": {
        "adaptive-dp": "tightlip.training.mitigations.adaptive_dp:AdaptiveMitigation",
        "adversarial": "tightlip.training.mitigations.adversarial:AdversarialMitigation",
        "dp": "tightlip.training.mitigations.dp:PrivateMitigation",
        "none": "tightlip.training.mitigations.none:NoMitigation",
        "triplet": "tightlip.training.mitigations.triplet:TripletMitigation",
    },
    "page": {
        "adaptive-paper": "tightlip.experiments.adaptive_page:AdaptivePage",
        "comparison": "tightlip.report.comparison:ComparisonPage",
        "extraction": "tightlip.report.extraction:ExtractionPage",
        "leakage": "tightlip.report.leakage:LeakagePage",
        "synthetic": "tightlip.report.synthetic:SyntheticPage",
        "vectors": "tightlip.report.vectors:VectorsPage",
        "vectors-paper": "tightlip.experiments.vectors_page:VectorsPaperPage",
        "weights": "tightlip.report.weights:WeightsPage",
    },
}


def names_of(kind: str) -> list[str]:
    return sorted(_REGISTERED[kind])


def look_up(kind: str, name: str) -> Any:
    """The object registered under `name`, imported now."""
    try:
        module, _, attribute = _REGISTERED[kind][name].partition(":")
    except KeyError:
        raise UsageError(unknown(kind, name, names_of(kind))) from None
    return getattr(import_module(module), attribute)


def unknown(kind: str, name: Any, available: list[str]) -> str:
    """The line for a name that does not exist, with the closest that does."""
    by_lower = {each.lower(): each for each in available}
    close = difflib.get_close_matches(str(name).lower(), by_lower, n=1)
    closest = f" Closest: {by_lower[close[0]]}." if close else ""
    return f"Unknown {kind} {name!r}.{closest} Available: {', '.join(available)}."
