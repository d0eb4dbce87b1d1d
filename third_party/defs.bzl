"""The C++ rules of this project: cc_library, cc_binary and cc_test with its warnings and its two ways of linking."""

# For our own code alone: other people's headers are system includes, which warn of nothing.
_COPTS = [
    "-Wall",
    "-Wextra",
    "-Werror",
    "-ffp-contract=off",
]

_STATIC = "@debian//:static_libraries"
_SHARED = "@debian//:shared_libraries"
_TEST = "@debian//:test_libraries"
_BENCHMARK = "@debian//:benchmark_libraries"

def sluice_cc_library(name, copts = [], **kwargs):
    """A library. Takes what cc_library takes."""
    native.cc_library(
        name = name,
        copts = _COPTS + copts,
        **kwargs
    )

def sluice_cc_binary(name, copts = [], linkopts = [], deps = [], archives = [], **kwargs):
    """A release program: stripped, and with nothing to load where it runs but glibc. Takes what cc_binary takes.

    Args:
      name: the program.
      copts: added to the project's.
      linkopts: added to the project's.
      deps: libraries.
      archives: filegroups of more archives to link, such as @debian//:test_libraries.
      **kwargs: passed on.
    """
    native.cc_binary(
        name = name,
        copts = _COPTS + copts,
        linkopts = linkopts + [
            "-Wl,-s",
            # The archives need each other in circles, hence the group. libstdc++ is in it as well, since the
            # -static-libstdc++ of gcc does not act on the -lstdc++ that Bazel adds at the end; that one is then not
            # needed any more.
            "-Wl,--start-group %s -l:libstdc++.a -Wl,--end-group" % " ".join([
                "$(locations %s)" % group
                for group in archives + [_STATIC]
            ]),
            "-static-libgcc",
            "-Wl,--as-needed",
            "-ldl",
            "-lpthread",
            "-lrt",
        ],
        additional_linker_inputs = archives + [_STATIC],
        linkstatic = True,
        deps = deps,
        **kwargs
    )

def sluice_cc_test(name, copts = [], linkopts = [], deps = [], **kwargs):
    """A GoogleTest program, main() included. Takes what cc_test takes; its size is small (a minute) unless given.

    It links the distribution's libraries shared: that is quick, and the thread sanitizer can tell their code from ours
    by the file it is in.

    Args:
      name: the test.
      copts: added to the project's.
      linkopts: added to the project's.
      deps: libraries; GoogleTest need not be among them.
      **kwargs: passed on.
    """
    kwargs.setdefault("size", "small")

    # Where TSAN_OPTIONS of --config=tsan looks for it: test programs start at the top of their runfiles.
    kwargs["data"] = kwargs.get("data", []) + ["//third_party/sanitizers:tsan.supp"]
    _test_program(native.cc_test, name, copts, linkopts, deps, "@debian//:gtest", _TEST, kwargs)

def sluice_cc_benchmark(name, copts = [], linkopts = [], deps = [], **kwargs):
    """A Google Benchmark program, main() included; run it with `bazel run`. Links as tests do.

    Args:
      name: the program.
      copts: added to the project's.
      linkopts: added to the project's.
      deps: libraries; Google Benchmark need not be among them.
      **kwargs: passed on.
    """
    kwargs["testonly"] = True
    _test_program(native.cc_binary, name, copts, linkopts, deps, "@debian//:benchmark", _BENCHMARK, kwargs)

def _test_program(rule, name, copts, linkopts, deps, framework_headers, framework, kwargs):
    rule(
        name = name,
        copts = _COPTS + copts,
        linkopts = linkopts + [
            "-Wl,--as-needed $(locations %s) $(locations %s)" % (framework, _SHARED),
            "-lpthread",
        ],
        additional_linker_inputs = [framework, _SHARED],
        linkstatic = True,
        deps = deps + [framework_headers] + select({
            "//third_party/sanitizers:tsan": ["//third_party/sanitizers:absl_mutex_tsan"],
            "//conditions:default": [],
        }),
        **kwargs
    )
