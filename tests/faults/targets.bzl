"""The target of this package that needs CUDA."""

load("//third_party:cuda_library.bzl", "cuda_library")

def illegal_access(name, enabled):
    """The kernel that writes where it must not.

    Args:
      name: the library.
      enabled: False: none.
    """
    if not enabled:
        return
    cuda_library(
        name = name,
        srcs = ["illegal_access.cu"],
        hdrs = ["illegal_access.h"],
        testonly = True,
    )
