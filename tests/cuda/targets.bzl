"""The test programs that need CUDA, for a machine with a GPU (./dev gpu-test)."""

load("//third_party:defs.bzl", "sluice_cc_binary", "sluice_cc_library")

# As in cuda_calls.cc.
_WRAPPED = [
    "cudaDeviceSynchronize",
    "cudaEventCreate",
    "cudaEventCreateWithFlags",
    "cudaEventDestroy",
    "cudaEventSynchronize",
    "cudaFree",
    "cudaFreeAsync",
    "cudaFreeHost",
    "cudaGetDriverEntryPointByVersion",
    "cudaHostAlloc",
    "cudaHostRegister",
    "cudaHostUnregister",
    "cudaMalloc",
    "cudaMallocAsync",
    "cudaMallocFromPoolAsync",
    "cudaMallocHost",
    "cudaMallocManaged",
    "cudaMallocPitch",
    "cudaMemcpy",
    "cudaMemset",
    "cudaStreamCreate",
    "cudaStreamCreateWithFlags",
    "cudaStreamCreateWithPriority",
    "cudaStreamDestroy",
    "cudaStreamSynchronize",
]

def cuda_tests(name, enabled, suites):
    """One program with every test for the GPU: kernels are large, and so are there once.

    Args:
      name: of the program.
      enabled: False: none.
      suites: libraries with tests that run on any device.
    """
    if not enabled:
        return
    sluice_cc_library(
        name = "no_cuda_calls_test",
        srcs = [
            "cuda_calls.cc",
            "cuda_calls.h",
            "no_cuda_calls_test.cc",
        ],
        linkopts = ["-Wl,--wrap=" + function for function in _WRAPPED],
        deps = [
            "//kernels/cuda:cuda_device",
            "//kernels/ops:float16",
            "//server/session",
            "//server/session:session_impl",
            "//tests/session:waitable",
            "@cuda//:runtime",
            "@debian//:gtest",
        ],
        alwayslink = True,
    )
    sluice_cc_binary(
        name = name,
        archives = ["@debian//:test_libraries"],
        deps = [":no_cuda_calls_test"] + suites,
    )
