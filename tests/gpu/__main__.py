"""Runs the tests that need a GPU, and says on what: `python -m tests.gpu [--save] [--standin] [pytest's arguments]`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import harness

from . import machine

HERE = Path(__file__).parent


class Outcomes:
    """What became of each test, and the figures that it recorded."""

    def __init__(self) -> None:
        self.tests: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        test: dict[str, Any] = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)}
        if report.skipped:
            test["reason"] = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        elif report.failed:
            test["reason"] = report.longreprtext.strip().splitlines()[-1:]
        if report.user_properties:
            test["figures"] = dict(report.user_properties)
        self.tests.append(test)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help=f"write the result below {harness.RESULTS}")
    parser.add_argument("--standin", action="store_true", help="on the stand-in driver, to test the tests")
    options, others = parser.parse_known_args()
    if options.standin:
        os.environ[machine.ON_STANDIN] = "1"
    try:
        facts = machine.facts(machine.open_gpu())
    except RuntimeError as error:
        print(f"{error}; nothing was tested")
        return int(pytest.ExitCode.NO_TESTS_COLLECTED)
    document = {"benchmark": "gpu_tests", **harness.environment(), **facts}
    for name in ("date", "device", "driver", "cuda", "compute_capability", "cpu", "python", "gpu_packages"):
        print(f"{name}: {document[name]}")
    outcomes = Outcomes()
    status = pytest.main([str(HERE), "-rs", *others], plugins=[outcomes])
    counts = {
        outcome: sum(test["outcome"] == outcome for test in outcomes.tests)
        for outcome in ("passed", "failed", "skipped")
    }
    for test in outcomes.tests:
        if "figures" in test:
            print(f"{test['test'].rpartition('::')[2]}: {test['figures']}")
    if options.save:
        path = harness.RESULTS / f"gpu_tests{'_standin' if options.standin else ''}.json"
        path.write_text(json.dumps({**document, "results": {**counts, "tests": outcomes.tests}}, indent=1) + "\n")
        print(f"written: {path}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
