"""Style checks of the whole checkout: ./dev check. Each prints one line, and what it found where it fails.

With --fix, formatting is put right first. With --junit FILE the results are also written there, one test case per check.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv/bin"


def tracked(*patterns):
    """Files that git knows, or would take, by glob pattern."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()
    return sorted({name for name in listing if (ROOT / name).is_file()})


def run(command, files=()):
    """Runs a tool over files; returns what it says where it fails, else ""."""
    if not files:
        return ""
    done = subprocess.run([*map(str, command), *files], cwd=ROOT, capture_output=True, text=True)
    return "" if done.returncode == 0 else (done.stdout + done.stderr).strip() or f"exit {done.returncode}"


def proto_lint():
    """buf lint, STANDARD rules, over our own protos: buf.yaml says what is left out."""
    protos = tracked("proto/*.proto")
    image = ROOT / ".cache/protos.binpb"
    image.parent.mkdir(exist_ok=True)
    packages = next(ROOT.glob(".venv/lib/python3*/site-packages"))
    # buf reads a compiled image, so that google/rpc needs no registry.
    compiled = run(
        [BIN / "python", "-m", "grpc_tools.protoc", "-Iproto", f"-I{packages}", "--include_imports",
         "--include_source_info", f"--descriptor_set_out={image}"],
        [name.removeprefix("proto/") for name in protos],
    )
    return compiled or run([BIN / "buf", "lint", "--config", "buf.yaml"], [str(image)])


def cc_files():
    return tracked("*.cc", "*.h", "*.cu", "*.cuh")


def bazel_files():
    return tracked("WORKSPACE", "BUILD", "*/WORKSPACE", "*/BUILD", "*.BUILD", "*.bzl")


def cc_format():
    """clang-format, by .clang-format: the first place in each file that is not as it formats."""
    found = run([BIN / "clang-format", "--dry-run", "-Werror", "--ferror-limit=1"], cc_files())
    return "\n".join(line for line in found.splitlines() if " error: " in line) or found


def bazel_format():
    """buildifier, formatting and lint."""
    return run([ROOT / ".tools/bin/buildifier", "-mode=check", "-lint=warn"], bazel_files())


def document_links():
    """Every relative link in a document leads to a file."""
    broken = []
    for name in tracked("*.md"):
        # Code is not a place for links.
        text = re.sub(r"```.*?```|`[^`\n]*`", "", (ROOT / name).read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(<?([^)\s>]+)>?[^)]*\)", text):
            path = target.partition("#")[0]
            if not path or re.match(r"[a-z]+:", path):
                continue
            base = ROOT if path.startswith("/") else (ROOT / name).parent
            if not (base / path.lstrip("/")).exists():
                broken.append(f"{name}: {target} leads nowhere")
    return "\n".join(broken)


def guarantees():
    """Every test that docs/guarantees.md names exists."""
    known = set()
    for name in tracked("tests/*.cc"):
        known.update(map(".".join, re.findall(r"^TEST(?:_[FP])?\((\w+),\s*(\w+)\)", (ROOT / name).read_text(), re.M)))
    for name in tracked("tests/*.py"):
        known.update(re.findall(r"^(?:async )?def (test_\w+)", (ROOT / name).read_text(), re.M))
    text = (ROOT / "docs/guarantees.md").read_text()
    named = re.findall(r"`([A-Z]\w+\.\w+|test_\w+)`", text)
    missing = [f"docs/guarantees.md: no test {name}" for name in named if name not in known]
    # A promise without a test is not one.
    bare = [line for line in text.splitlines() if line.startswith("| ") and line.endswith("|  |")]
    return "\n".join(missing + bare)


CHECKS = [proto_lint, cc_format, bazel_format, document_links, guarantees]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--junit", type=pathlib.Path, help="write the results there")
    parser.add_argument("--fix", action="store_true", help="format C++ and Bazel files first")
    arguments = parser.parse_args()
    if arguments.fix:
        run([BIN / "clang-format", "-i"], cc_files())
        run([ROOT / ".tools/bin/buildifier", "-mode=fix"], bazel_files())
    suite = ElementTree.Element("testsuite", name="checks")
    failed = False
    for check in CHECKS:
        found = check()
        case = ElementTree.SubElement(suite, "testcase", classname="checks", name=check.__name__)
        print(f"{'FAIL' if found else 'ok  '} {check.__name__}", flush=True)
        if found:
            failed = True
            print(found, flush=True)
            ElementTree.SubElement(case, "failure", message=found)
    if arguments.junit:
        ElementTree.ElementTree(suite).write(arguments.junit)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
