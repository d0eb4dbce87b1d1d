"""Runs the tests and closes with one line that counts their cases: ./dev test.

Arguments go to `bazel test`. With targets or a --config among them only these C++ tests run; otherwise everything is
built, and all C++ tests, Python tests and checks run. A failure does not stop the rest, so that the count is whole.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import urllib.parse
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache/test"


@dataclasses.dataclass
class Count:
    """Test cases by outcome, and the names of those that failed."""

    passed: int = 0
    skipped: int = 0
    failed: list = dataclasses.field(default_factory=list)

    def add_junit(self, path, prefix=""):
        """Adds the cases of a JUnit file."""
        for case in ElementTree.parse(path).iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                name = ".".join(filter(None, (case.get("classname"), case.get("name"))))
                self.failed.append(prefix + name)
            elif case.find("skipped") is not None or case.get("status") == "notrun":
                self.skipped += 1
            else:
                self.passed += 1


def step(text):
    print(f"== {text}", file=sys.stderr, flush=True)


def run_bazel(arguments, count):
    """Builds and runs C++ tests; adds their cases. Returns whether everything built."""
    events_path = CACHE / "bazel-events.json"
    events_path.unlink(missing_ok=True)
    code = subprocess.run(
        ["bazel", "test", "--keep_going", "--noshow_progress", "--show_result=0", "--ui_event_filters=-info",
         f"--build_event_json_file={events_path}", *arguments],
        cwd=ROOT,
    ).returncode
    events = [json.loads(line) for line in events_path.open()] if events_path.exists() else []
    for event in events:
        if "testResult" not in event:
            continue
        label = event["id"]["testResult"]["label"]
        status = event["testResult"]["status"]
        failures_before = len(count.failed)
        for output in event["testResult"].get("testActionOutput", []):
            if output["name"] == "test.xml":
                path = pathlib.Path(urllib.parse.unquote(urllib.parse.urlparse(output["uri"]).path))
                count.add_junit(path, f"{label} ")
        # A crash or a timeout leaves no failed case behind.
        if status not in ("PASSED", "FLAKY") and len(count.failed) == failures_before:
            count.failed.append(f"{label} ({status.lower()})")
    # 3: tests failed, and are counted. 4: there are no tests.
    built = code in (0, 3, 4)
    if not built:
        unbuilt = [
            event["id"]["targetCompleted"]["label"] for event in events
            if "targetCompleted" in event.get("id", {}) and not event.get("completed", {}).get("success")
            and "aborted" not in event
        ]
        count.failed += [f"{label} (does not build)" for label in unbuilt] or [f"bazel (exit {code})"]
    return built


def run_junit(name, command, count):
    """Runs a command that writes a JUnit file, whose path is put after it; adds the cases."""
    junit = CACHE / f"{name}.xml"
    junit.unlink(missing_ok=True)
    environment = os.environ | {
        "SLUICED": str(ROOT / "bazel-bin/server/sluiced"),
        "SLUICECTL": str(ROOT / "bazel-bin/client/sluicectl"),
        "GRPCURL": str(ROOT / ".tools/bin/grpcurl"),
    }
    failures_before = len(count.failed)
    code = subprocess.run([*command, str(junit)], cwd=ROOT, env=environment).returncode
    if junit.exists():
        count.add_junit(junit)
    if code != 0 and len(count.failed) == failures_before:
        count.failed.append(f"{name} (exit {code})")


def main():
    arguments = sys.argv[1:]
    count = Count()
    CACHE.mkdir(parents=True, exist_ok=True)
    targets = [argument for argument in arguments if not argument.startswith("-")]
    cc_only = bool(targets) or any(argument.startswith("--config") for argument in arguments)

    step("C++ tests")
    built = run_bazel(arguments + ([] if targets else ["//..."]), count)
    if not cc_only:
        if any(ROOT.glob("tests/**/*_test.py")) or any(ROOT.glob("tests/**/test_*.py")):
            step("Python tests")
            if built:
                run_junit("pytest", [sys.executable, "-m", "pytest", "-q", "tests", "--junit-xml"], count)
            else:
                count.failed.append("pytest (not run: the build failed)")
        step("Checks")
        run_junit("checks", [sys.executable, "tools/checks.py", "--junit"], count)

    for name in count.failed:
        print(f"FAILED {name}")
    print(f"{count.passed} passed, {len(count.failed)} failed, {count.skipped} skipped", flush=True)
    return 1 if count.failed else 0


if __name__ == "__main__":
    sys.exit(main())
