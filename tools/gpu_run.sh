#!/usr/bin/env bash
# Runs what ./dev gpu-package has laid beside it, on a machine with a GPU: checks first, then times, a short table last.
#
#   run.sh             everything
#   run.sh test        the conformance suite
#   run.sh sanitize    a small part of it under compute-sanitizer, each of its tools
#   run.sh bench [NAME]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

failed=()

run() {
  local name=$1
  shift
  echo "== $name"
  "$@" || failed+=("$name")
}

conformance() { run conformance ./cuda_conformance --gtest_brief=1; }

sanitize() {
  local tool sanitizer
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)
  if [[ -z $sanitizer ]]; then
    echo "no compute-sanitizer here"
    return
  fi
  for tool in memcheck racecheck initcheck synccheck; do
    run "$tool" "$sanitizer" --tool "$tool" --error-exitcode 9 ./cuda_conformance \
      --gtest_brief=1 --gtest_filter="${SANITIZE_FILTER:-*BatchesOfMixedLengths*:*ScaleSoftcap*:*TopKIsInOrder*:*StoreThenGather*:*MergeOfParts*}"
  done
}

bench() { run bench ./cuda_bench "$@"; }

case ${1:-all} in
  all) conformance && sanitize; bench ;;
  test) conformance ;;
  sanitize) sanitize ;;
  bench) shift; bench "$@" ;;
  *) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac

if (( ${#failed[@]} )); then
  echo "failed: ${failed[*]}"
  exit 1
fi
