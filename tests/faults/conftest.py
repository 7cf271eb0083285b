"""How many faults were tried, and how many were held: told at the end of `make faults`."""

from collections import Counter

import pytest

from faults.cases import write_place
from faults.harm import ASKED, Bench


@pytest.fixture
def tally(request):
    """Counts a fault of a kind: tally("kills", held). It is a test's own property, so that
    counts of several workers come together."""

    def count(kind, held):
        request.node.user_properties.append(("fault", (kind, bool(held))))

    return count


def pytest_terminal_summary(terminalreporter):
    if not ASKED:
        return
    tried, held = Counter(), Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) != "call":
                continue
            for name, fault in report.user_properties:
                if name == "fault":
                    tried[fault[0]] += 1
                    held[fault[0]] += fault[1]
    terminalreporter.write_line(f"\n{'faults':<24}{'tried':>8}{'held':>8}{'not held':>10}")
    for kind in sorted(tried):
        counts = f"{tried[kind]:>8,}{held[kind]:>8,}{tried[kind] - held[kind]:>10,}"
        terminalreporter.write_line(f"{kind:<24}{counts}")


@pytest.fixture(scope="session")
def bench(shared, command, tmp_path_factory):
    return Bench(command, shared("faults", write_place), tmp_path_factory.mktemp("bench"))
