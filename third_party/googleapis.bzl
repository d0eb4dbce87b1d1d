"""The google.rpc protos, taken from the Python package googleapis-common-protos."""

_BUILD = """
load("@sluice//third_party:proto.bzl", "sluice_proto_library")

sluice_proto_library(
    name = "rpc_cc",
    srcs = [
        "google/rpc/error_details.proto",
        "google/rpc/status.proto",
    ],
    grpc = False,
    import_root = ".",
    visibility = ["//visibility:public"],
)
"""

_MISSING = "googleapis-common-protos is not in .venv: run ./dev build once, which puts it there"

def _googleapis_repository_impl(ctx):
    # The checkout's own virtual environment; its folder name carries the Python version.
    python_folders = ctx.path(Label("//:WORKSPACE")).dirname.get_child(".venv").get_child("lib")
    if not python_folders.exists:
        fail(_MISSING)
    for python in python_folders.readdir():
        rpc = python.get_child("site-packages").get_child("google").get_child("rpc")
        if rpc.exists:
            for proto in ["error_details.proto", "status.proto"]:
                ctx.symlink(rpc.get_child(proto), "google/rpc/" + proto)
            ctx.file("BUILD", _BUILD)
            return
    fail(_MISSING)

googleapis_repository = repository_rule(
    implementation = _googleapis_repository_impl,
    doc = "Compiles google/rpc/status.proto and error_details.proto as @googleapis//:rpc_cc.",
    local = True,
)
