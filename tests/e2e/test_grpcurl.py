"""grpcurl with no proto files at hand: reflection, health, errors, and the sessions that documents show."""

import json
import os
import re
import subprocess

import pytest
import transcript
from daemon import GRPCURL, ROOT
from sluice.v1 import admin_pb2, attention_pb2, sequence_pb2, session_pb2, swap_pb2

SERVICES = {
    service.full_name: service
    for file in (admin_pb2, attention_pb2, sequence_pb2, session_pb2, swap_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()}


def grpcurl(daemon, *arguments, data=None, status=0):
    """Runs grpcurl on what follows the address; returns what it prints."""
    flags = ["-plaintext", *(["-d", json.dumps(data)] if data is not None else [])]
    done = subprocess.run(
        [GRPCURL, *flags, daemon.address, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_services_are_listed(daemon):
    listed = set(grpcurl(daemon, "list").split())
    assert {*SERVICES, "grpc.health.v1.Health"} <= listed
    assert any(name.startswith("grpc.reflection.") for name in listed)


@pytest.mark.parametrize("service", list(SERVICES))
def test_services_are_described(daemon, service):
    methods = {method.full_name for method in SERVICES[service].methods}
    assert set(grpcurl(daemon, "list", service).split()) == methods
    described = grpcurl(daemon, "describe", service)
    assert all(f"rpc {method.name} (" in described for method in SERVICES[service].methods)
    request = SERVICES[service].methods[0].input_type.full_name
    assert f"message {request.rsplit('.', 1)[1]} {{" in grpcurl(daemon, "describe", request)


@pytest.mark.parametrize("service", ["", *SERVICES])
def test_health(daemon, service):
    reply = grpcurl(daemon, "grpc.health.v1.Health/Check", data={"service": service})
    assert json.loads(reply) == {"status": "SERVING"}


def test_health_of_an_unknown_service_is_not_found(daemon):
    assert "NotFound" in grpcurl(daemon, "grpc.health.v1.Health/Check", data={"service": "nothing"}, status=64 + 5)


def test_the_unix_socket_serves_too(daemon):
    done = subprocess.run(
        [GRPCURL, "-plaintext", f"unix://{daemon.socket}", "sluice.v1.AdminService/GetServer"],
        capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["version"]


def test_errors_carry_their_details(daemon):
    spec = {"num_layers": 1, "num_query_heads": 3, "num_kv_heads": 2, "head_dim": 16, "block_tokens": 1,
            "max_blocks": 1}
    told = grpcurl(daemon, "sluice.v1.SessionService/OpenSession", data={"spec": spec}, status=64 + 3)
    for part in ("InvalidArgument", "google.rpc.ErrorInfo", "INVALID_FIELD", '"sluice"', "spec.num_query_heads"):
        assert part in told
    told = grpcurl(daemon, "sluice.v1.SessionService/GetSession",
                   data={"session": {"name": "nobody's", "epoch": 1}}, status=64 + 5)
    for part in ("NotFound", "google.rpc.ResourceInfo", "SESSION_NOT_FOUND", "nobody's"):
        assert part in told


def documents():
    """The documents that show a session."""
    candidates = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    return [
        str(path.relative_to(ROOT)) for path in candidates
        if path.exists() and transcript.find(path, "grpcurl session") is not None]


@pytest.mark.parametrize("document", documents())
def test_the_session_in_a_document(daemon, tmp_path, document):
    commands = transcript.find(ROOT / document, "grpcurl session")
    assert commands
    for command in commands:
        command.text = command.text.replace("7464", str(daemon.port))
    environment = {**os.environ, "PATH": f"{GRPCURL.parent}:{os.environ['PATH']}"}
    transcript.check(commands, transcript.run(commands, tmp_path, environment))


def test_some_document_has_a_session():
    assert documents()


def test_transcripts_compare_as_they_say(tmp_path):
    document = tmp_path / "document.md"
    document.write_text(
        "<!-- test: a -->\n```console\n$ x=1; echo \\\n  two  words\ntwo words\n$ echo $x; echo b; echo c\n1\n...\n"
        "$ echo ERROR: it; exit_status=3; (exit 3)\nERROR: ...\n```\n")
    commands = transcript.find(document, "a")
    assert [command.output for command in commands] == [["two words"], ["1", "..."], ["ERROR: ..."]]
    outcomes = transcript.run(commands, tmp_path, os.environ)
    assert [outcome.status for outcome in outcomes] == [0, 0, 3]
    transcript.check(commands, outcomes)
    assert transcript.find(document, "b") is None
    for wrong in (["2", "..."], ["1"], ["1", "b", "c", "d"], ["1", "c", "..."]):
        assert not transcript.matches(wrong, outcomes[1].output)
    outcomes[0].status = 1
    with pytest.raises(AssertionError):
        transcript.check(commands, outcomes)


def test_every_command_of_the_api_document_works_in_order(start_daemon):
    daemon = start_daemon("--hbm_budget_bytes=4294967296", "--host_budget_bytes=1073741824")
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/api.md").read_text(), re.DOTALL)
    script = "\n".join(blocks).replace("127.0.0.1:7464", daemon.address)
    assert script.count("grpcurl") > 20
    path = f"{os.path.dirname(os.path.abspath(GRPCURL))}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", script], capture_output=True, text=True, timeout=100, env={**os.environ, "PATH": path})
    assert done.returncode == 0, done.stderr
