r"""Sessions of a shell in documents: finding them and running them.

A session is the fenced code block after `<!-- test: NAME -->`. Its lines that start with `$ ` are commands (a `\` at
the end continues one), the lines after a command are its output: `...` in it stands for anything, alone on a line for
any number of lines. No output given: any will do. A command succeeds, unless its output starts with `ERROR:`.
"""

import dataclasses
import pathlib
import re
import subprocess

TIMEOUT_S = 120


@dataclasses.dataclass
class Command:
    text: str
    output: list


@dataclasses.dataclass
class Outcome:
    status: int
    output: str


def find(document, name):
    """The commands of the session of that name, or None."""
    pattern = rf"^<!-- test: {re.escape(name)} -->\s*^```\w*\n(.*?)^```"
    match = re.search(pattern, pathlib.Path(document).read_text(), re.MULTILINE | re.DOTALL)
    if not match:
        return None
    commands = []
    for line in match.group(1).splitlines():
        if line.startswith("$ "):
            commands.append(Command(line[2:], []))
        elif commands and commands[-1].text.endswith("\\"):
            commands[-1].text += "\n" + line
        elif commands:
            commands[-1].output.append(line)
    return commands


def run(commands, folder, environment):
    """Runs commands in order in one bash; returns their outcomes, with error output within the output."""
    script = "".join(
        f"{{\n{command.text}\n}} >{folder}/{index}.out 2>&1 </dev/null; echo $? >{folder}/{index}.status\n"
        for index, command in enumerate(commands))
    subprocess.run(["bash", "-c", script], env=environment, cwd=folder, timeout=TIMEOUT_S, check=False)
    return [
        Outcome(int((folder / f"{index}.status").read_text()), (folder / f"{index}.out").read_text())
        for index in range(len(commands))]


def matches(expected, output):
    """Whether output is what the lines of `expected` say; how much blank lies between words does not count."""

    def squeezed(line):
        return " ".join(line.split())

    patterns = []
    for line in expected:
        if line.strip() == "...":
            patterns.append(r"(?:.*\n)*")
        else:
            patterns.append(".*".join(re.escape(part) for part in squeezed(line).split("...")) + r"\n")
    actual = "".join(squeezed(line) + "\n" for line in output.splitlines())
    return re.fullmatch("".join(patterns), actual) is not None


def check(commands, outcomes):
    """Asserts that each command came to what the document says."""
    for command, outcome in zip(commands, outcomes, strict=True):
        told = f"$ {command.text}\n{outcome.output}(exit {outcome.status})"
        fails = bool(command.output) and command.output[0].startswith("ERROR:")
        assert (outcome.status != 0) == fails, told
        if command.output:
            assert matches(command.output, outcome.output), f"{told}\ninstead of\n" + "\n".join(command.output)
