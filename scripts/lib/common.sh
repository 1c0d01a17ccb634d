# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# shellcheck shell=bash
#
# Code that scripts need before they can run the programs that have to be built first (xtask, tests/integration): messages, checks
# and the compiler. Source this file from bash with `set -euo pipefail` in force. It defines functions and two variables, and has
# no other effect.
#
#   CAROM_ROOT      top of the checkout
#   CAROM_SCRIPT    name of the script that sourced this, for messages
#
# Functions with a result print it on stdout. Messages go to stderr.

CAROM_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
CAROM_SCRIPT=$(basename "$0")
export CAROM_ROOT CAROM_SCRIPT

# info TEXT: prints one line on stderr.
info() {
    progress_end
    printf '%s: %s\n' "$CAROM_SCRIPT" "$*" >&2
}

# die TEXT: reports a failure, and exits with status 1.
die() {
    info "$*"
    exit 1
}

# progress TEXT: shows the current step. On a terminal, the line is overwritten by the next one.
progress() {
    if [[ -t 2 ]]; then
        printf '\r\033[K[%3d s] %.*s' "$SECONDS" "$((${COLUMNS:-100} - 9))" "$1" >&2
        _progress_open=1
    else
        printf '[%3d s] %s\n' "$SECONDS" "$1" >&2
    fi
}

# progress_end: finishes an open progress line on a terminal.
progress_end() {
    if [[ -n ${_progress_open:-} ]]; then
        printf '\r\033[K' >&2
        _progress_open=
    fi
}

# carom_cache: creates the cache directory, and prints its path.
carom_cache() {
    local dir=${CAROM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/carom}
    mkdir -p "$dir"
    (cd "$dir" && pwd)
}

# check_places: fails if a program that is needed later cannot work with the path of this checkout or of the cache.
check_places() {
    local cache target=${CARGO_TARGET_DIR:-$CAROM_ROOT/target}
    cache=$(carom_cache)
    [[ $CAROM_ROOT$target != *[:$'\n']* ]] || die "cargo does not support a colon or a line break in a directory name: $CAROM_ROOT, $target; move the checkout, or set CARGO_TARGET_DIR"
    [[ $cache != *[:[:space:]]* ]] ||
        die "cannot build the kernel in a directory with a blank or a colon in its name: $cache; set CAROM_CACHE to another directory"
}

# as_root COMMAND…: runs the command as root, with sudo if necessary.
as_root() {
    if ((EUID == 0)); then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        die "needs root for: $* (run as root, or install sudo)"
    fi
}

# need_packages WHY PACKAGE…: installs the missing Debian packages, and reports that.
need_packages() {
    local why=$1 pkg log missing=()
    shift
    command -v dpkg-query >/dev/null || die "this is not a Debian system; install the equivalents of these packages by hand: $*"
    for pkg; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$pkg" 2>/dev/null) == installed ]] || missing+=("$pkg")
    done
    ((${#missing[@]})) || return 0
    info "installing Debian packages ($why): ${missing[*]}"
    log=$(mktemp)
    # The package lists may be missing (container images) or too old. Refresh them only if the first attempt fails.
    if ! as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}" >"$log" 2>&1 </dev/null; then
        if ! {
            as_root apt-get update &&
                as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"
        } >"$log" 2>&1 </dev/null; then
            tail -n 20 "$log" >&2
            rm -f "$log"
            die "cannot install these Debian packages: ${missing[*]}"
        fi
    fi
    rm -f "$log"
}

# rust_version: prints the oldest Rust version that can build the workspace.
rust_version() {
    sed -n 's/^rust-version = "\(.*\)"/\1/p' "$CAROM_ROOT/Cargo.toml"
}

# rust_is_fine: true if cargo is installed and new enough.
rust_is_fine() {
    local have
    have=$(cargo --version 2>/dev/null | sed -n 's/^cargo \([0-9.]*\).*/\1/p')
    [[ -n $have && $(printf '%s\n' "$(rust_version)" "$have" | sort -V | head -n 1) == "$(rust_version)" ]]
}

# need_rust: makes a Rust that is new enough available. If necessary, installs it from rust-lang.org into the cache, so that the
# user's home directory stays unchanged.
need_rust() {
    local cache server=${RUSTUP_UPDATE_ROOT:-https://static.rust-lang.org/rustup}/dist/x86_64-unknown-linux-gnu
    ! rust_is_fine || return 0
    cache=$(carom_cache)
    export RUSTUP_HOME=$cache/rustup CARGO_HOME=$cache/cargo PATH=$cache/cargo/bin:$PATH
    ! rust_is_fine || return 0
    info "installing Rust $(rust_version) into $cache (no Rust is installed, or it is too old)"
    need_packages "fetching Rust" curl ca-certificates
    (
        dir=$(mktemp -d)
        trap 'rm -rf "$dir"' EXIT
        cd "$dir" || exit
        curl --proto '=https' --tlsv1.2 -fsSL --remote-name-all "$server/rustup-init" "$server/rustup-init.sha256" ||
            die "cannot fetch Rust; install Rust $(rust_version) or newer by hand (https://rustup.rs)"
        printf '%s  rustup-init\n' "$(cut -d' ' -f1 rustup-init.sha256)" | sha256sum --check --quiet
        chmod +x rustup-init
        ./rustup-init -q -y --no-modify-path --profile minimal --component rustfmt --component clippy --default-toolchain "$(rust_version)"
    ) >&2
    rust_is_fine || die "cannot install Rust $(rust_version)"
}

# show_crates TEXT: copies cargo's output, and shows how many crates cargo has started to compile. Without a terminal, shows every
# 20th crate.
show_crates() {
    local line count=0
    while IFS= read -r line; do
        printf '%s\n' "$line"
        [[ $line == *' Compiling '* ]] || continue
        ((count += 1))
        if [[ -t 2 ]] || ((count % 20 == 0)); then
            progress "$1: crate $count"
        fi
    done
}

# become PROGRAM ARGUMENT…: builds a program of the workspace if it is out of date, and runs it in place of this script.
become() {
    local program=$1 target log status=0
    shift
    check_places
    need_packages "building" gcc libc6-dev
    need_rust
    progress "building $program"
    log=$(mktemp)
    # Build it as part of the whole workspace. Cargo then always uses the same features, and builds each dependency only once.
    (cd "$CAROM_ROOT" && cargo build --locked --workspace --bin "$program") 2>&1 | show_crates "building $program" >"$log" || status=$?
    progress_end
    ((status == 0)) || tail -n 40 "$log" >&2
    rm -f "$log"
    ((status == 0)) || die "cannot build $program: see the compiler's output above"
    target=$(cd "$CAROM_ROOT" && cargo metadata --format-version 1 --no-deps --locked | grep -o '"target_directory":"[^"]*"' | cut -d'"' -f4)
    exec "$target/debug/$program" "$@"
}

# become_tool ARGUMENT…: runs the xtask command with the name of this script, in place of the script. Help needs no build.
become_tool() {
    local argument
    for argument; do
        [[ $argument != -h && $argument != --help ]] || exec cat "$CAROM_ROOT/xtask/src/help/$CAROM_SCRIPT.txt"
    done
    become carom-tools "$CAROM_SCRIPT" "$@"
}
