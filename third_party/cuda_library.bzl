"""cuda_library: .cu files compiled by nvcc."""

load("@cuda//:defs.bzl", "CUDA_HOME")
load("//third_party:defs.bzl", "sluice_cc_library")

# Machine code for Hopper and, for anything from Ampere on, PTX that the driver compiles at start. --config=cuda_sm90 and
# --config=cuda_ptx, in .bazelrc, take one of the two.
_ARCHITECTURES = {
    "//third_party:cuda_sm90": "-gencode=arch=compute_90a,code=sm_90a",
    "//third_party:cuda_ptx": "-gencode=arch=compute_80,code=compute_80",
    "//conditions:default": "-gencode=arch=compute_90a,code=sm_90a -gencode=arch=compute_80,code=compute_80",
}

_FLAGS = " ".join([
    "-std=c++20",
    "-O3",
    "-lineinfo",
    "-Werror all-warnings",
    "-Xcompiler=-Wall,-Wextra,-Wno-unused-parameter,-g0,-fPIC",
    "-I.",
])

def cuda_library(name, srcs, hdrs = [], deps = [], **kwargs):
    """A library of .cu files, each compiled on its own.

    Args:
      name: the library.
      srcs: .cu files.
      hdrs: every header of this repository that they include, and what users of the library include.
      deps: libraries that users of the headers need.
      **kwargs: passed on to cc_library.
    """
    objects = []
    for src in srcs:
        object_name = src[:-len(".cu")] + ".cu.o"
        objects.append(object_name)
        native.genrule(
            name = name + "_" + src[:-len(".cu")],
            srcs = [src, "@cuda//:version"] + hdrs,
            outs = [object_name],
            cmd = select({
                key: "%s/bin/nvcc %s %s -c $(location %s) -o $@" % (CUDA_HOME, _FLAGS, flags, src)
                for key, flags in _ARCHITECTURES.items()
            }),
            message = "Compiling CUDA",
            testonly = kwargs.get("testonly", False),
        )
    sluice_cc_library(
        name = name,
        srcs = objects,
        hdrs = [hdr for hdr in hdrs if ":" not in hdr],
        deps = deps + ["@cuda//:runtime"],
        linkstatic = True,
        **kwargs
    )
