# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# shellcheck shell=bash
#
# Code of scripts before they become a program that has to be built first (xtask, tests/integration): messages, checks,
# the compiler. Source it from bash with `set -euo pipefail` in force; it defines functions and two variables and does nothing else.
#
#   CAROM_ROOT      top of the checkout
#   CAROM_SCRIPT    name of the script that sourced this, for messages
#
# Functions whose result is a value print it on stdout; messages go to stderr.

CAROM_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
CAROM_SCRIPT=$(basename "$0")
export CAROM_ROOT CAROM_SCRIPT

# info TEXT: one line on stderr.
info() {
    progress_end
    printf '%s: %s\n' "$CAROM_SCRIPT" "$*" >&2
}

# die TEXT: something failed; exit status 1.
die() {
    info "$*"
    exit 1
}

# progress TEXT: shows what is being done, on a terminal in a line that is overwritten.
progress() {
    if [[ -t 2 ]]; then
        printf '\r\033[K[%3d s] %.*s' "$SECONDS" "$((${COLUMNS:-100} - 9))" "$1" >&2
        _progress_open=1
    else
        printf '[%3d s] %s\n' "$SECONDS" "$1" >&2
    fi
}

# progress_end: finishes a progress line that is open on a terminal.
progress_end() {
    if [[ -n ${_progress_open:-} ]]; then
        printf '\r\033[K' >&2
        _progress_open=
    fi
}

# carom_cache: prints the cache directory, which exists afterwards.
carom_cache() {
    local dir=${CAROM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/carom}
    mkdir -p "$dir"
    (cd "$dir" && pwd)
}

# check_places: fails where this checkout or the cache is at a place with which a program that is needed later cannot do.
check_places() {
    local cache target=${CARGO_TARGET_DIR:-$CAROM_ROOT/target}
    cache=$(carom_cache)
    [[ $CAROM_ROOT$target != *[:$'\n']* ]] || die "cargo cannot do with a colon or a line break in a directory's name: $CAROM_ROOT, $target"
    [[ $cache != *[:[:space:]]* ]] ||
        die "the kernel cannot be built in a directory with a blank or a colon in its name: $cache; set CAROM_CACHE to another one"
}

# as_root COMMAND…: runs it as root, by sudo where need be.
as_root() {
    if ((EUID == 0)); then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        die "needs root for: $* (run as root, or install sudo)"
    fi
}

# need_packages WHY PACKAGE…: installs those Debian packages that are missing, and says so.
need_packages() {
    local why=$1 pkg log missing=()
    shift
    command -v dpkg-query >/dev/null || die "this is no Debian system; install by hand what corresponds to: $*"
    for pkg; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$pkg" 2>/dev/null) == installed ]] || missing+=("$pkg")
    done
    ((${#missing[@]})) || return 0
    info "installing Debian packages ($why): ${missing[*]}"
    log=$(mktemp)
    # The package lists may be absent (container images) or too old; refresh them only when needed.
    if ! as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}" >"$log" 2>&1 </dev/null; then
        if ! {
            as_root apt-get update &&
                as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"
        } >"$log" 2>&1 </dev/null; then
            tail -n 20 "$log" >&2
            rm -f "$log"
            die "could not install: ${missing[*]}"
        fi
    fi
    rm -f "$log"
}

# rust_version: the oldest Rust that the workspace builds with.
rust_version() {
    sed -n 's/^rust-version = "\(.*\)"/\1/p' "$CAROM_ROOT/Cargo.toml"
}

# rust_is_fine: whether there is a cargo that is new enough.
rust_is_fine() {
    local have
    have=$(cargo --version 2>/dev/null | sed -n 's/^cargo \([0-9.]*\).*/\1/p')
    [[ -n $have && $(printf '%s\n' "$(rust_version)" "$have" | sort -V | head -n 1) == "$(rust_version)" ]]
}

# need_rust: Rust new enough, where need be from rust-lang.org into the cache, so that nothing in the user's home changes.
need_rust() {
    local cache server=${RUSTUP_UPDATE_ROOT:-https://static.rust-lang.org/rustup}/dist/x86_64-unknown-linux-gnu
    ! rust_is_fine || return 0
    cache=$(carom_cache)
    export RUSTUP_HOME=$cache/rustup CARGO_HOME=$cache/cargo PATH=$cache/cargo/bin:$PATH
    ! rust_is_fine || return 0
    info "installing Rust $(rust_version) into $cache (there is none, or an older one)"
    need_packages "fetching Rust" curl ca-certificates
    (
        dir=$(mktemp -d)
        trap 'rm -rf "$dir"' EXIT
        cd "$dir" || exit
        curl --proto '=https' --tlsv1.2 -fsSL --remote-name-all "$server/rustup-init" "$server/rustup-init.sha256" ||
            die "could not fetch Rust; install Rust $(rust_version) or newer by hand (https://rustup.rs)"
        printf '%s  rustup-init\n' "$(cut -d' ' -f1 rustup-init.sha256)" | sha256sum --check --quiet
        chmod +x rustup-init
        ./rustup-init -q -y --no-modify-path --profile minimal --component rustfmt --component clippy --default-toolchain "$(rust_version)"
    ) >&2
    rust_is_fine || die "Rust $(rust_version) could not be installed"
}

# become PROGRAM ARGUMENT…: builds a program of the workspace where it is out of date, and becomes it.
become() {
    local program=$1 target log status=0
    shift
    check_places
    need_packages "building" gcc libc6-dev
    need_rust
    progress "building $program"
    log=$(mktemp)
    # As a part of the whole workspace: cargo then gives what it builds the same features each time, and builds it once.
    (cd "$CAROM_ROOT" && cargo build --locked --workspace --bin "$program") >"$log" 2>&1 || status=$?
    progress_end
    ((status == 0)) || tail -n 40 "$log" >&2
    rm -f "$log"
    ((status == 0)) || die "$program does not build"
    target=$(cd "$CAROM_ROOT" && cargo metadata --format-version 1 --no-deps --locked | grep -o '"target_directory":"[^"]*"' | cut -d'"' -f4)
    exec "$target/debug/$program" "$@"
}

# become_tool ARGUMENT…: becomes the part of xtask that has the name of this script. Help needs no building.
become_tool() {
    local argument
    for argument; do
        [[ $argument != -h && $argument != --help ]] || exec cat "$CAROM_ROOT/xtask/src/help/$CAROM_SCRIPT.txt"
    done
    become carom-tools "$CAROM_SCRIPT" "$@"
}
