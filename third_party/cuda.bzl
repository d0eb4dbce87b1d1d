"""CUDA: where its compiler is, and the rule that calls it.

The toolkit is taken from CUDA_HOME, else /usr/local/cuda, else .cuda in the checkout, where ./dev puts NVIDIA's wheels
(third_party/cuda-requirements.txt). Where there is none, one line says so and @cuda//:defs.bzl has HAVE_CUDA = False:
kernels/cuda then consists of a stub, and the rest is built as ever.
"""

_DEFS = """
HAVE_CUDA = {have}
CUDA_HOME = "{home}"
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

exports_files(["version"])
"""

_RUNTIME = """
# Headers, and the runtime as an archive: a program needs nothing of CUDA's where it runs but the driver.
cc_library(
    name = "runtime",
    srcs = ["libcudart_static.a"],
    hdrs = glob(["include/**"]),
    includes = ["include"],
    linkopts = [
        "-ldl",
        "-lpthread",
        "-lrt",
    ],
)
"""

def _candidates(ctx):
    checkout = ctx.path(Label("//:WORKSPACE")).dirname
    given = ctx.os.environ.get("CUDA_HOME", "")
    if given:
        return [ctx.path(given)]
    return [
        ctx.path("/usr/local/cuda"),
        checkout.get_child(".cuda").get_child("nvidia").get_child("cu13"),
    ]

def _cuda_repository_impl(ctx):
    for home in _candidates(ctx):
        nvcc = home.get_child("bin").get_child("nvcc")
        if not nvcc.exists:
            continue
        lib = home.get_child("lib64")
        if not lib.get_child("libcudart_static.a").exists:
            lib = home.get_child("lib")
        if not lib.get_child("libcudart_static.a").exists:
            continue
        version = ctx.execute([str(nvcc), "--version"])
        if version.return_code != 0:
            continue
        ctx.symlink(home.get_child("include"), "include")
        ctx.symlink(lib.get_child("libcudart_static.a"), "libcudart_static.a")

        # An input of every compilation, so that another compiler means compiling again.
        ctx.file("version", version.stdout)
        ctx.file("defs.bzl", _DEFS.format(have = True, home = str(home.realpath)))
        ctx.file("BUILD", _BUILD + _RUNTIME)
        return
    print("No nvcc in CUDA_HOME, /usr/local/cuda or .cuda: building without CUDA.")  # buildifier: disable=print
    ctx.file("version", "none")
    ctx.file("defs.bzl", _DEFS.format(have = False, home = ""))
    ctx.file("BUILD", _BUILD)

cuda_repository = repository_rule(
    implementation = _cuda_repository_impl,
    doc = "Finds the CUDA toolkit: @cuda//:runtime, HAVE_CUDA and CUDA_HOME in @cuda//:defs.bzl.",
    environ = ["CUDA_HOME"],
    local = True,
)
