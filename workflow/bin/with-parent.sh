#!/usr/bin/env bash
# The shell of Snakemake's jobs: bash in strict mode whose processes all end when Snakemake does, even by kill -9.
#
# setpriv asks the kernel to send TERM to this wrapper when its parent dies; the wrapper passes TERM, INT and HUP on to
# the job's own process group, so that a training writes its checkpoint and nothing is left behind. Snakemake adds
# strict mode only to a shell named "bash", so it is switched on here. Without setpriv the job is a plain bash.
set -u
strict=(-e -u -o pipefail)
if [ "${1-}" != --parent ]; then
    if setpriv --pdeathsig TERM true 2>/dev/null; then
        exec setpriv --pdeathsig TERM -- "$BASH" "$0" --parent "$PPID" "$@"
    fi
    exec "$BASH" "${strict[@]}" "$@"
fi
# The parent may have died before the kernel was asked: then the process that adopted this one is its parent.
[ "$PPID" = "$2" ] || exit 143
shift 2

job=
caught=
pass_on() {
    caught=$1
    [ -z "$job" ] || kill -s "$caught" -- "-$job" 2>/dev/null
}
trap 'pass_on TERM' TERM
trap 'pass_on INT' INT
trap 'pass_on HUP' HUP
# Job control gives the job a process group of its own and leaves it able to receive INT.
set -m
"$BASH" "${strict[@]}" "$@" </dev/null &
job=$!
[ -z "$caught" ] || pass_on "$caught"
while :; do
    caught=
    wait "$job"
    status=$?
    # A signal interrupts the wait, not the job: wait again for the job's own status.
    [ -n "$caught" ] || exit "$status"
done
