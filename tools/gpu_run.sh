#!/usr/bin/env bash
# Runs what ./dev gpu-package has laid beside it, on a machine with a GPU: checks first, then times, a short table last.
#
#   run.sh             everything
#   run.sh test        all tests: kernels, sessions, no CUDA calls when warm, a stress, and a GPU that fails
#   run.sh sanitize    a small part of them under compute-sanitizer, each of its tools
#   run.sh llama       a Llama-shaped model through the daemon (needs torch, transformers, grpcio, ml_dtypes in python3)
#   run.sh bench [NAME]
#   run.sh unpack DIR  only lay the programs into DIR
#
# SLUICE_STRESS_SECONDS (120) is how long 64 sessions are under stress; SLUICE_SEED runs the random cases of a seed.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

failed=()

run() {
  local name=$1
  shift
  echo "== $name"
  "$@" || failed+=("$name")
}

unpack() { mkdir -p "$1" && tar xJf "$here/programs.tar.xz" -C "$1"; }

enter() {
  programs=$(mktemp -d)
  trap 'rm -rf "$programs"' EXIT
  unpack "$programs"
  cd "$programs" || exit 1
}

tests() {
  # The stress apart, since it has a length of its own.
  run tests env SLUICE_STRESS_SECONDS=3 ./cuda_tests --gtest_brief=1 --gtest_filter=-ManySessions.*
  run stress env SLUICE_STRESS_SECONDS="${SLUICE_STRESS_SECONDS:-120}" ./cuda_tests --gtest_brief=1 \
    --gtest_filter=ManySessions.*
  run "a GPU that fails" env SLUICE_FAULT_DEVICE=cuda SLUICE_FAULTY_DAEMON=./faulty_sluiced \
    ./faulty_daemon_check --gtest_brief=1
}

sanitize() {
  local tool sanitizer
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)
  if [[ -z $sanitizer ]]; then
    echo "no compute-sanitizer here"
    return
  fi
  for tool in memcheck racecheck initcheck synccheck; do
    run "$tool" "$sanitizer" --tool "$tool" --error-exitcode 9 ./cuda_tests \
      --gtest_brief=1 --gtest_filter="${SANITIZE_FILTER:-*BatchesOfMixedLengths*:*ScaleSoftcap*:*TopKIsInOrder*:*StoreThenGather*:*MergeOfParts*}"
  done
}

# Kernels, then sessions without gRPC, then the daemon.
bench() {
  run "kernels" ./cuda_bench "$@"
  run "sessions" ./session_bench "$@"
  run "daemon" ./sluice_bench "${1:-rpc_gpu}"
  [[ -n ${1:-} ]] || run "offload" ./sluice_bench rpc_offload
}

# A model beside torch and transformers, where Python has them and gRPC.
llama() { run llama python3 tests/gpu/llama.py --sluiced ./sluiced; }

if [[ ${1:-} != unpack && ! -e /dev/nvidiactl ]]; then
  echo "there is no GPU here: nothing is run"
  exit 0
fi
case ${1:-all} in
  all) enter; tests; sanitize; bench ;;
  test) enter; tests ;;
  sanitize) enter; sanitize ;;
  llama) enter; llama ;;
  bench) shift; enter; bench "$@" ;;
  unpack) unpack "${2:?a folder}" ;;
  *) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac

if (( ${#failed[@]} )); then
  echo "failed: ${failed[*]}"
  exit 1
fi
