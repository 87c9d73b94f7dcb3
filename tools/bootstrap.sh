#!/usr/bin/env bash
# Makes .venv: pinned packages, attngeo itself, the compiled operators and FFCV. Run by `make env`; safe to run again.
#
#   tools/bootstrap.sh [--test]     --test adds the test tools
#
# Variables: PYTHON=python3.12         the interpreter to build on
#            TORCH_INDEX=URL           a package index for torch and torchvision alone (for example a CPU build)
#            SYSTEM_PACKAGES=0         never install system packages, even as root
#            REQUIRE_FFCV=1            fail where FFCV cannot be had, instead of going on with the torch loader
#            REQUIRE_EXTENSION=1       fail where the operators cannot be compiled, instead of the naive forms
# Each stage leaves a stamp as its last act, so a stage that was interrupted is done again and a finished one is skipped.
set -euo pipefail
unset PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

readonly disk_needed_gb=12
readonly python=.venv/bin/python
readonly stamps=.venv/.attngeo
readonly system_packages_apt=(g++ pkg-config libopencv-imgproc-dev libturbojpeg0-dev libgl1 libglib2.0-0)

say() { printf '==> %s\n' "$*"; }
warn() { printf 'warning: %s\n' "$*" >&2; }
fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}
have() { command -v "$1" >/dev/null 2>&1; }
# The SHA-256 of what stands on the standard input.
digest() { sha256sum | cut -d ' ' -f 1; }
stamp_is() { [ -f "$stamps/$1" ] && [ "$(<"$stamps/$1")" = "$2" ]; }
stamp() {
    mkdir -p "$stamps"
    printf '%s' "$2" >"$stamps/$1.new"
    mv -f "$stamps/$1.new" "$stamps/$1"
}
pip() { "$python" -m pip "$@"; }
quiet=()
[ -t 1 ] || quiet=(--quiet --quiet --progress-bar off)
version_of() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null || true; }

# --- what the machine must have ---------------------------------------------------------------------------------

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
        if have "$candidate" && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; then
            # Of an environment that is active, the interpreter that it was made with.
            "$candidate" -c 'import sys; print(sys._base_executable)'
            return
        elif [ -n "${PYTHON:-}" ]; then
            return
        fi
    done
}

has_venv() { "$1" -c 'import venv, ensurepip' >/dev/null 2>&1; }
has_headers() {
    "$1" -c 'import os, sysconfig as s, sys; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))'
}
compiler() {
    local candidate
    for candidate in ${CXX:+"$CXX"} g++ c++; do
        if have "$candidate"; then
            printf '%s' "$candidate"
            return
        fi
    done
}

# Whether FFCV's libraries are really here: their headers compile, they link, and what OpenCV's wheel loads exists.
has_ffcv_libraries() {
    local cxx work libraries
    cxx=$(compiler)
    [ -n "$cxx" ] && have pkg-config || return 1
    # Debian keeps ldconfig off a user's PATH. Read whole: a reader that stops early would make the pipe's status 141.
    libraries=$(PATH="$PATH:/usr/sbin:/sbin" ldconfig -p 2>/dev/null) || return 1
    [[ $libraries == *'libGL.so.1 '* && $libraries == *'libgthread-2.0.so.0 '* ]] || return 1
    work=$(mktemp -d /tmp/attngeo-check.XXXXXX)
    cat >"$work/check.cpp" <<'CODE'
#include <opencv2/core.hpp>
#include <opencv2/imgproc.hpp>
#include <turbojpeg.h>
int main() {
    cv::Mat image(2, 2, CV_8UC3);
    cv::resize(image, image, cv::Size(1, 1));
    tjFree(nullptr);
}
CODE
    if "$cxx" -I/usr/include/opencv4 "$work/check.cpp" -o "$work/check" -lopencv_imgproc -lopencv_core -lturbojpeg \
        >/dev/null 2>&1; then
        rm -rf "$work"
    else
        rm -rf "$work"
        return 1
    fi
}

# Prints the one line that installs what `missing` names, in the words of this system's package manager.
install_line() {
    local base=python3 apt=() dnf=() what
    [[ ${PYTHON:-} =~ ^python3\.[0-9]+$ ]] && base=$PYTHON
    for what in "$@"; do
        case $what in
        python) apt+=("$base") dnf+=("$base") ;;
        venv) apt+=("$base-venv") dnf+=("$base") ;;
        make) apt+=(make) dnf+=(make) ;;
        compiler) apt+=(g++) dnf+=(gcc-c++) ;;
        headers) apt+=("$base-dev") dnf+=("$base-devel") ;;
        ffcv)
            apt+=("${system_packages_apt[@]}")
            dnf+=(gcc-c++ pkgconf-pkg-config opencv-devel turbojpeg-devel mesa-libGL glib2)
            ;;
        esac
    done
    if have apt-get; then
        printf 'apt-get update && apt-get install -y --no-install-recommends %s\n' "$(unique "${apt[@]}")"
    elif have dnf; then
        printf 'dnf install -y %s\n' "$(unique "${dnf[@]}")"
    else
        printf 'install with the package manager of this system what Debian calls: %s\n' "$(unique "${apt[@]}")"
    fi
}
unique() { printf '%s\n' "$@" | awk '!seen[$0]++' | paste -sd ' ' -; }

may_install() { [ "${SYSTEM_PACKAGES:-1}" != 0 ] && [ "$(id -u)" = 0 ] && have apt-get; }

# Installs what is missing as root with apt; elsewhere says the line. Never asks for rights.
install_missing() {
    local line
    line=$(install_line "$@")
    if ! may_install; then
        printf '    as root:  %s\n' "$line"
        return 1
    fi
    say "installing system packages ($*); SYSTEM_PACKAGES=0 switches this off"
    if ! (
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq
        # shellcheck disable=SC2086  # the line's words are package names
        apt-get install -y -qq -o DPkg::Lock::Timeout=300 --no-install-recommends ${line##*recommends } >/dev/null
    ); then
        warn "apt-get failed; by hand:  $line"
        return 1
    fi
    hash -r
}

# Python's environments, and the commands that pip writes into them, cannot bear every path.
check_path() {
    local LC_ALL=C path what=
    path=$(pwd -P)
    # pip starts a command through sh where the interpreter's path has a blank, quoted then, or is long, unquoted.
    case $path in
    *:*) what="a colon" ;;
    *[[:cntrl:]]*) what="a tab, a line break or the like" ;;
    *' '*) [[ $path != *[\"\$\`\\]* ]] || what='a blank and one of " $ ` \' ;;
    *) ((${#path} < 100)) || [[ $path != *[\'\"\$\`\\\&\;\|\<\>\(\)*?[]* ]] || what="100 bytes or more and a sign of sh" ;;
    esac
    [ -z "$what" ] || fail "Python cannot work in a folder whose path holds $what: move it, now ${path//[[:cntrl:]]/?}"
}

check_machine() {
    local missing=() fatal=() base free_kb have_kb
    [ "$(uname -s) $(uname -m)" = "Linux x86_64" ] || warn "only Linux on x86-64 is tested, this is $(uname -s) $(uname -m)"
    base=$(find_python)
    if [ -z "$base" ]; then
        missing+=(python venv)
        fatal+=("Python 3.11 to 3.13 (set PYTHON=... to name it)")
    else
        has_venv "$base" || { missing+=(venv) && fatal+=("Python's venv module"); }
        has_headers "$base" || missing+=(headers)
    fi
    have make || missing+=(make)
    [ -n "$(compiler)" ] || missing+=(compiler)
    has_ffcv_libraries || missing+=(ffcv)
    free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
    have_kb=$([ -d .venv ] && du -sk .venv | cut -f 1 || echo 0)
    if ((free_kb + have_kb < disk_needed_gb * 1000000)); then
        fail "$disk_needed_gb GB of disk are needed here, $((free_kb / 1000000)) GB are free: make space or move the project"
    fi
    [ "${#missing[@]}" -gt 0 ] || return 0
    [ "${#fatal[@]}" -eq 0 ] || say "missing: ${fatal[*]}"
    [[ " ${missing[*]} " != *" compiler "* ]] || say "missing: a C++ compiler (without it the naive operators run)"
    [[ " ${missing[*]} " != *" headers "* ]] || say "missing: Python's headers (without them the naive operators run)"
    [[ " ${missing[*]} " != *" ffcv "* ]] || say "missing: libraries of FFCV (without them the torch loader runs)"
    install_missing "${missing[@]}" || true
    if [ "${#fatal[@]}" -gt 0 ]; then
        base=$(find_python)
        if [ -z "$base" ] || ! has_venv "$base"; then
            fail "cannot go on without ${fatal[*]}: run the line above, then this command again"
        fi
    fi
}

# --- the stages ----------------------------------------------------------------------------------------------------

locked() { sed -n "s/^$1==//p" "$2"; }

base_key() { printf '%s %s %s' "$(digest <requirements.lock)" "$(version_of "$python")" "$PWD"; }

# Packages by their pins. Finds out at the end whether every file arrived, since a killed pip leaves half of one behind.
install_base() {
    local damaged base
    if stamp_is base "$(base_key)" && { [ -z "${TORCH_INDEX:-}" ] || stamp_is torch-index "$TORCH_INDEX"; } &&
        { [ -z "${PYTHON:-}" ] || [ "$(version_of "$PYTHON")" = "$(version_of "$python")" ]; }; then
        return
    fi
    check_machine
    base=$(find_python)
    if [ -n "$(version_of "$python")" ] && pip --version >/dev/null 2>&1 &&
        { [ ! -f "$stamps/root" ] || stamp_is root "$PWD"; } &&
        { [ -z "${PYTHON:-}" ] || [ "$(version_of "$PYTHON")" = "$(version_of "$python")" ]; }; then
        rm -f "$stamps/base"
    else
        [ ! -e .venv ] || say ".venv is damaged, moved or of another Python: making it anew"
        say "making .venv with $base ($(version_of "$base"))"
        # The stamps go first: clearing takes a while and may be interrupted.
        rm -rf "$stamps"
        "$base" -m venv --clear .venv
    fi
    stamp root "$PWD"
    say "installing pinned packages into .venv (about 6 GB with CUDA; a repeated command continues)"
    pip install "${quiet[@]}" --upgrade 'pip>=25'
    if [ -n "${TORCH_INDEX:-}" ]; then
        local again=()
        stamp_is torch-index "$TORCH_INDEX" || again=(--force-reinstall)
        pip install "${quiet[@]}" --no-deps "${again[@]}" --index-url "$TORCH_INDEX" \
            "torch==$(locked torch requirements.lock)" "torchvision==$(locked torchvision requirements.lock)"
        stamp torch-index "$TORCH_INDEX"
    else
        pip install "${quiet[@]}" "torch==$(locked torch requirements.lock)" \
            "torchvision==$(locked torchvision requirements.lock)"
    fi
    pip install "${quiet[@]}" -r requirements.lock
    damaged=$("$python" tools/damaged_packages.py)
    if [ -n "$damaged" ]; then
        say "installing again what an earlier attempt left incomplete: ${damaged//$'\n'/ }"
        # shellcheck disable=SC2086  # one name==version a word
        pip install "${quiet[@]}" --force-reinstall --no-deps $damaged
    fi
    stamp base "$(base_key)"
}

install_test_tools() {
    local key
    key="$(cat requirements.lock requirements-test.lock | digest) $(version_of "$python")"
    stamp_is test "$key" && return
    say "installing the test tools"
    pip install "${quiet[@]}" -r requirements-test.lock
    stamp test "$key"
}

# attngeo and its extension's Python part, by path. The key holds what shapes the installation, not the sources.
install_project() {
    local key
    key="$(cat pyproject.toml cuda_ext/setup.py cuda_ext/pyproject.toml 2>/dev/null | digest) $(<"$stamps/base")"
    stamp_is project "$key" && return
    say "installing attngeo by path"
    pip install "${quiet[@]}" --no-deps --no-build-isolation -e .
    [ ! -f cuda_ext/setup.py ] ||
        pip install "${quiet[@]}" --no-deps --no-build-isolation -e ./cuda_ext
    stamp project "$key"
}

# The extension's own setup knows what changed, and records the reason where it cannot be built.
build_extension() {
    local log status=0
    [ -f cuda_ext/setup.py ] || return 0
    # Not below cuda_ext: that need not be writable where its binary is current.
    log=$stamps/extension.log
    ATTNGEO_REQUIRE_EXTENSION=${REQUIRE_EXTENSION:-0} \
        "$python" cuda_ext/setup.py build_ext --inplace >"$log" 2>&1 || status=$?
    if [ "$status" != 0 ]; then
        tail -n 15 "$log" >&2
        # A setting or a permission that only the user can put right: no reason to go on without the operators.
        [ "$status" != 2 ] || fail "the build of the operators could not begin: do what the ERROR line above says"
        [ "${REQUIRE_EXTENSION:-0}" != 1 ] || fail "the operators could not be compiled (whole log: $log)"
        warn "the operators could not be compiled (whole log: $log): the naive forms run, and every record says so"
    fi
    grep '^attngeo_ext:' "$log" | grep -v ': up to date' || true
}

ffcv_unavailable() {
    [ "${REQUIRE_FFCV:-0}" != 1 ] || fail "REQUIRE_FFCV=1 and $1"
    warn "$1: the torch loader runs, and every record says so"
}

# Whether FFCV's compiled part is here with every library that it loads.
ffcv_is_whole() {
    local needed
    needed=$(ldd .venv/lib/python3*/site-packages/ffcv/_libffcv*.so 2>&1) && [[ $needed != *'not found'* ]]
}

# FFCV has no wheel: it is compiled here, never taken from a cache, so that a missing library shows.
install_ffcv() {
    local key stub log
    key="$(digest <requirements-ffcv.lock) $(<"$stamps/base")"
    if stamp_is ffcv "$key" && ffcv_is_whole; then
        return
    fi
    if ! has_ffcv_libraries; then
        say "FFCV needs system libraries that are not here"
        if ! install_missing ffcv || ! has_ffcv_libraries; then
            ffcv_unavailable "FFCV's system libraries are missing"
            return
        fi
    fi
    if [ "${REQUIRE_FFCV:-0}" != 1 ] && stamp_is ffcv-failed "$key"; then
        ffcv_unavailable "FFCV did not build before (REQUIRE_FFCV=1 tries again)"
        return
    fi
    say "building FFCV"
    # ffcv's setup splits what pkg-config prints on blanks, and the project's path may hold some.
    stub=$(mktemp -d /tmp/attngeo-opencv.XXXXXX)
    cp -R tools/opencv-min/. "$stub"
    log=$stub/build.log
    if pip install "${quiet[@]}" -r <(grep -v '^ffcv==' requirements-ffcv.lock) >"$log" 2>&1 &&
        PKG_CONFIG_PATH="$stub${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}" pip install --no-deps --no-build-isolation \
            --force-reinstall --no-cache-dir --no-binary ffcv "ffcv==$(locked ffcv requirements-ffcv.lock)" >>"$log" 2>&1 &&
        "$python" -c 'import ffcv' >>"$log" 2>&1; then
        rm -rf "$stub"
        rm -f "$stamps/ffcv-failed"
        stamp ffcv "$key"
    else
        tail -n 15 "$log" >&2
        rm -rf "$stub"
        pip uninstall --quiet --yes ffcv >/dev/null 2>&1 || true
        stamp ffcv-failed "$key"
        ffcv_unavailable "FFCV did not build (see the lines above)"
    fi
}

main() {
    cd "$(dirname "$0")/.."
    local with_test=0
    case ${1:-} in
    '') ;;
    --test) with_test=1 ;;
    *) fail "unknown argument $1; use: tools/bootstrap.sh [--test]" ;;
    esac
    check_path
    if have flock; then
        exec 9<tools/bootstrap.sh
        if ! flock -n 9; then
            say "another bootstrap is at work in this folder: waiting for it"
            flock 9
        fi
    fi
    trap 'warn "interrupted: the same command continues"; exit 130' INT TERM
    install_base
    [ "$with_test" = 0 ] || install_test_tools
    install_project
    build_extension
    install_ffcv
}

main "$@"
