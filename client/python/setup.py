"""Generates the stubs of proto/sluice/v1 before setuptools looks for them. A source distribution brings them along."""

import importlib.resources
import pathlib

import google.rpc
import setuptools
from grpc_tools import protoc

HERE = pathlib.Path(__file__).resolve().parent
PROTOS = HERE.parent.parent / "proto"


def generate():
    stubs = HERE / "sluice" / "v1"
    stubs.mkdir(parents=True, exist_ok=True)
    # google/rpc/status.proto lies beside its stub.
    common = pathlib.Path(next(iter(google.rpc.__path__))).parent.parent
    arguments = [
        "protoc",
        f"-I{PROTOS}",
        f"-I{common}",
        f"-I{importlib.resources.files('grpc_tools') / '_proto'}",
        f"--python_out={HERE}",
        f"--pyi_out={HERE}",
        *map(str, sorted(PROTOS.glob("sluice/v1/*.proto"))),
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("generating the stubs failed")
    (stubs / "__init__.py").touch()


if PROTOS.is_dir():
    generate()
setuptools.setup()
