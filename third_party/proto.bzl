"""Compiles .proto files with the distribution's protoc and gRPC plugin."""

_PROTOC = "@debian//:protoc"
_GRPC_PLUGIN = "@debian//:grpc_cpp_plugin"

def _import_root_impl(ctx):
    # Generated headers include each other by the protos' own paths. They are system includes: their warnings are not
    # ours.
    roots = [ctx.attr.path, ctx.bin_dir.path + "/" + ctx.attr.path]
    context = cc_common.create_compilation_context(system_includes = depset(roots))
    return [CcInfo(compilation_context = context)]

_import_root = rule(
    implementation = _import_root_impl,
    attrs = {"path": attr.string(doc = "Import root of protos, from the top of the execution folder.")},
    doc = "Puts an import root of protos on the include path of what depends on it.",
)

def sluice_proto_library(name, srcs, import_root, deps = [], imports = {}, grpc = True, visibility = None):
    """A C++ library of the messages in some .proto files, and of their services where `grpc` is set.

    A proto at IMPORT_ROOT/a/b.proto is imported as "a/b.proto"; its headers are "a/b.pb.h" and "a/b.grpc.pb.h".
    google/protobuf/*.proto can be imported without saying so here.

    Args:
      name: the library. NAME_protos is a filegroup of the sources, for the `imports` of others.
      srcs: the .proto files.
      import_root: the folder, from the top of the repository, that the protos' own paths start from; "." for the top.
      deps: C++ libraries of the imported protos.
      imports: a dictionary from filegroups of imported protos to the import root of each, as seen from the top of the
        execution folder.
      grpc: whether to generate services.
      visibility: of the library and the filegroup.
    """
    external = native.repository_name()[1:]
    root = "/".join([part for part in ["external", external] if external] + [import_root])
    outs = [
        src[:-len(".proto")] + suffix
        for src in srcs
        for suffix in [".pb.h", ".pb.cc"] + ([".grpc.pb.h", ".grpc.pb.cc"] if grpc else [])
    ]
    proto_paths = [root] + imports.values() + ["external/debian/include"]
    command = ["$(execpath %s)" % _PROTOC] + ["--proto_path=" + path for path in proto_paths]
    command.append("--cpp_out=$(GENDIR)/" + root)
    if grpc:
        command += ["--plugin=protoc-gen-grpc=$(execpath %s)" % _GRPC_PLUGIN, "--grpc_out=$(GENDIR)/" + root]
    command += ["$(execpath %s)" % src for src in srcs]

    native.filegroup(
        name = name + "_protos",
        srcs = srcs,
        visibility = visibility,
    )
    native.genrule(
        name = name + "_generated",
        srcs = srcs + imports.keys() + ["@debian//:protobuf_protos"],
        outs = outs,
        cmd = " ".join(command),
        message = "Generating C++ from protos:",
        tools = [_PROTOC, _GRPC_PLUGIN],
    )

    _import_root(
        name = name + "_import_root",
        path = root,
    )
    native.cc_library(
        name = name,
        srcs = [out for out in outs if out.endswith(".cc")],
        hdrs = [out for out in outs if out.endswith(".h")],
        copts = ["-w"],
        visibility = visibility,
        deps = deps + [name + "_import_root"] + (["@debian//:grpc"] if grpc else ["@debian//:protobuf"]),
    )
