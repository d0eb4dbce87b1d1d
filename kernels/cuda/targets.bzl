"""The targets of this package that need CUDA."""

load("//third_party:cuda_library.bzl", "cuda_library")
load("//third_party:defs.bzl", "sluice_cc_library")

KERNEL_HEADERS = [
    "attend.cuh",
    "attend_args.h",
    "attend_fold.cuh",
    "attend_kernels.h",
    "attend_launch.cuh",
    "attend_load.cuh",
    "attend_shape.cuh",
    "attend_split.cuh",
    "attend_walk.cuh",
    "launch.cuh",
    "mma.cuh",
    "op_kernels.h",
    "pipeline.cuh",
    "score.cuh",
    "state.cuh",
]

def cuda_targets(name, enabled):
    """Kernels and the device around them.

    Args:
      name: of the library that has all of it.
      enabled: False: none.
    """
    if not enabled:
        return
    cuda_library(
        name = "kernels",
        srcs = [
            "attend_bf16_x1.cu",
            "attend_bf16_x2.cu",
            "attend_fp16_x1.cu",
            "attend_fp16_x2.cu",
            "copy.cu",
            "project.cu",
            "score.cu",
            "score_blocks.cu",
            "score_top.cu",
            "state_ops.cu",
        ],
        hdrs = KERNEL_HEADERS + ["//kernels/ops:params.h"],
        visibility = ["//tests:__subpackages__"],
        deps = ["//kernels/ops:params"],
    )
    sluice_cc_library(
        name = "attend_call",
        srcs = [
            "attend_call.cc",
            "attend_plan.cc",
        ],
        hdrs = [
            "attend_call.h",
            "attend_plan.h",
        ],
        visibility = ["//tests:__subpackages__"],
        deps = [":kernels"],
    )
    sluice_cc_library(
        name = "runtime",
        srcs = [
            "driver.cc",
            "error.cc",
            "memory.cc",
            "stream.cc",
        ],
        hdrs = [
            "driver.h",
            "error.h",
            "memory.h",
            "stream.h",
        ],
        deps = [
            "//kernels/device",
            "//kernels/ops:check",
            "@cuda//:runtime",
            "@debian//:absl",
        ],
    )
    sluice_cc_library(
        name = name,
        srcs = [
            "cuda_device.cc",
            "cuda_ops.cc",
            "cuda_ops.h",
        ],
        deps = [
            ":attend_call",
            ":cuda_device_header",
            ":kernels",
            ":runtime",
            "//kernels/device",
            "//kernels/ops",
            "//kernels/ops:check_params",
            "@debian//:absl",
        ],
    )
