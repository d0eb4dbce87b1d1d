"""The benchmark of the CUDA kernels, which needs CUDA."""

load("//kernels/cuda:targets.bzl", "KERNEL_HEADERS")
load("//third_party:cuda_library.bzl", "cuda_library")
load("//third_party:defs.bzl", "sluice_cc_binary", "sluice_cc_library")

def cuda_bench(name, enabled):
    """The program, for a machine with a GPU (./dev gpu-bench).

    Args:
      name: of the kernels' program; that of the sessions is session_bench.
      enabled: False: none.
    """
    if not enabled:
        return
    sluice_cc_library(
        name = "latency",
        testonly = True,
        srcs = ["latency.cc"],
        hdrs = ["latency.h"],
        deps = [
            "//kernels/cuda:cuda_device",
            "//kernels/ops",
        ],
    )
    cuda_library(
        name = name + "_lib",
        testonly = True,
        srcs = ["cuda_bench.cu"],
        hdrs = ["//kernels/cuda:" + header for header in KERNEL_HEADERS + [
            "attend_call.h",
            "attend_plan.h",
        ]] + [
            "latency.h",
            "//kernels/ops:params.h",
        ],
        deps = [
            ":latency",
            "//kernels/cuda:attend_call",
            "//kernels/cuda:kernels",
        ],
    )
    sluice_cc_binary(
        name = name,
        testonly = True,
        deps = [":%s_lib" % name],
    )
    sluice_cc_binary(
        name = "session_bench",
        testonly = True,
        srcs = ["session_bench.cc"],
        deps = [
            "//kernels/cuda:cuda_device",
            "//server/base:logging",
            "//server/session",
            "//server/session:session_impl",
            "//tests/bench",
            "@debian//:absl",
        ],
    )
