#!/usr/bin/env bash
# The shell of Snakemake's jobs: bash in strict mode whose processes all end when Snakemake does, even by kill -9.
#
# setpriv asks the kernel to send TERM to this wrapper when its parent dies; the wrapper passes TERM, INT and HUP on to
# the job's own process group, so that a training writes its checkpoint and nothing is left behind. The job gets KILL
# when this wrapper dies before it, and a guard ends what the job's group leaves, however the wrapper and the job ended.
# A job that takes no notice of TERM is killed after a minute. Snakemake adds strict mode only to a shell named "bash", so
# it is switched on here. Without setpriv the job is a plain bash, and `attngeo doctor` says so.
set -u
strict=(-e -u -o pipefail)
case ${1-} in
--parent | --wrapper)
    # The parent may have died before the kernel was asked: then the process that adopted this one is its parent.
    [ "$PPID" = "$2" ] || exit 143
    [ "$1" = --parent ] || exec "$BASH" "${strict[@]}" "${@:3}"
    shift 2
    ;;
*)
    if setpriv --pdeathsig TERM true 2>/dev/null; then
        exec setpriv --pdeathsig TERM -- "$BASH" "$0" --parent "$PPID" "$@"
    fi
    exec "$BASH" "${strict[@]}" "$@" </dev/null
    ;;
esac

readonly checkpoint_half_seconds=120
caught=
stopping=
alive=
pass_on() {
    caught=$1
    # The kernel sends TERM again for each thread of a dying parent, and a training ends at once when told twice.
    [ "$caught $stopping" != "TERM TERM" ] || return
    [ -n "$alive" ] || return
    stopping=$caught
    kill -s "$caught" -- "-$job" 2>/dev/null
    [ "$caught" != TERM ] || echo >&"$alive"
}
# Whether a process of the job's group still runs; one that ended and that nobody has waited for does not.
group_runs() {
    local file line state group
    kill -s 0 -- "-$job" 2>/dev/null || return 1
    for file in /proc/[0-9]*/stat; do
        { read -r line <"$file"; } 2>/dev/null || continue
        line=${line##*) } # state, parent, group, ...
        state=${line%% *}
        group=${line#* * }
        [ "${group%% *}" != "$job" ] || [[ $state == [ZX] ]] || return 0
    done
    return 1
}
# Ends what is left of the job's group: TERM, and KILL two seconds later.
end_group() {
    group_runs || return
    kill -s TERM -- "-$job"
    for _ in {1..20}; do
        sleep 0.1
        group_runs || return
    done
    kill -s KILL -- "-$job"
    for _ in {1..20}; do # the kernel takes its time, and until it has, the job may still write
        group_runs || return
        sleep 0.1
    done
}
trap 'pass_on TERM' TERM
trap 'pass_on INT' INT
trap 'pass_on HUP' HUP
# Job control gives the job and the guard a process group each and leaves the job able to receive INT. It is off again
# before the wait, which would otherwise end when the job is only stopped.
set -m
setpriv --pdeathsig KILL -- "$BASH" "$0" --wrapper "$$" "$@" </dev/null &
job=$!
# The guard reads until this wrapper, which alone holds the other end, closes it or dies. A line says that TERM came:
# then it waits no longer than a checkpoint takes, and ends when nothing is left to wait for, which also wakes a wrapper
# that bash, caught between two signals, left waiting for a job that is gone.
coproc guard {
    if read -r; then
        for ((half = 0; half < checkpoint_half_seconds; half++)); do
            read -r -t 0.5
            [ "$?" -gt 128 ] && group_runs || break
        done
    fi
    end_group
} 2>/dev/null
# shellcheck disable=SC2154  # coproc sets it
guard_process=$guard_PID
trap '' PIPE
exec {alive}>&"${guard[1]}" {guard[1]}>&-
set +m
[ -z "$caught" ] || pass_on "$caught"
while :; do
    caught=
    wait "$job"
    status=$?
    # A signal interrupts the wait, not the job: wait again for the job's own status.
    [ -n "$caught" ] || break
done
# A signal ends the job's shell at once, while a training still writes its checkpoint; a second one would cut that short.
while [ -n "$stopping" ] && group_runs; do
    sleep 0.2
done
exec {alive}>&-
wait "$guard_process"
exit "$status"
