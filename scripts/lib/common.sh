# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# shellcheck shell=bash
#
# Functions shared by the project's scripts. Source it from bash with `set -euo pipefail` in force; it defines
# functions and two variables and does nothing else.
#
#   CAROM_ROOT      top of the checkout
#   CAROM_SCRIPT    name of the script that sourced this, for messages
#
# Functions whose result is a value print it on stdout and nothing else there; messages go to stderr.

CAROM_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
CAROM_SCRIPT=$(basename "$0")
export CAROM_ROOT CAROM_SCRIPT

# ---- messages ---------------------------------------------------------------------------------------------------

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

# usage_error TEXT: the caller's mistake; exit status 2.
usage_error() {
    info "$* (try '$CAROM_SCRIPT --help')"
    exit 2
}

# progress TEXT: shows what is being done. On a terminal one line that rewrites itself; elsewhere plain lines, of which
# those with the same text up to the first ':' appear at most every 10 s.
progress() {
    local now=$SECONDS stage=${1%%:*}
    if [[ -t 2 ]]; then
        printf '\r\033[K[%3d s] %.*s' "$now" "$((${COLUMNS:-100} - 9))" "$1" >&2
        _progress_open=1
    elif [[ $stage != "${_progress_stage:-}" ]] || ((now - ${_progress_at:-0} >= 10)); then
        printf '[%3d s] %s\n' "$now" "$1" >&2
        _progress_at=$now
    fi
    _progress_stage=$stage
}

# progress_end: finishes a progress line that is open on a terminal.
progress_end() {
    if [[ -n ${_progress_open:-} ]]; then
        printf '\r\033[K' >&2
        _progress_open=
    fi
}

# attended COMMAND…: runs it so that a signal to this script need not wait for its end, and returns its status.
attended() {
    local status=0
    "$@" &
    _attended=$!
    wait "$_attended" || status=$?
    _attended=
    return "$status"
}

# end_attended: ends what `attended` runs, with all that descends from it, and waits for it. For a script's cleanup.
end_attended() {
    [[ -n ${_attended:-} ]] || return 0
    _end_tree "$_attended"
    wait "$_attended" 2>/dev/null || true
}

_end_tree() {
    local child children
    children=$(cat "/proc/$1/task/"*/children 2>/dev/null || true)
    for child in $children; do
        _end_tree "$child"
    done
    kill "$1" 2>/dev/null || true
}

# ---- cache ------------------------------------------------------------------------------------------------------

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

# run_dir NAME: makes a directory for this run, prints its name, and removes those of runs that were killed.
run_dir() {
    local stale pid
    for stale in "${TMPDIR:-/tmp}/$1".*; do
        pid=${stale##*/"$1".}
        pid=${pid%%.*}
        [[ ! -O $stale || ! $pid =~ ^[0-9]+$ ]] || kill -0 "$pid" 2>/dev/null || rm -rf "$stale"
    done
    mktemp -d "${TMPDIR:-/tmp}/$1.$$.XXXXXX"
}

# content_key [FILE|DIR|=STRING]…: prints 20 hex digits that change when any of the files (their bytes, executable bits
# and names below DIR) or strings does.
content_key() {
    local item
    for item; do
        case $item in
        =*) printf 'string %s\n' "${item#=}" ;;
        *)
            [[ -e $item ]] || die "content_key: no such file: $item"
            if [[ -d $item ]]; then
                (cd "$item" && find . -type f -printf '%p %m\0' | LC_ALL=C sort -z |
                    while IFS= read -r -d '' f; do
                        printf '%s ' "$f"
                        sha256sum <"${f% *}"
                    done)
            else
                sha256sum <"$item"
            fi
            ;;
        esac
    done | sha256sum | cut -c1-20
}

# cache_dir_for KIND KEY BUILDER…: prints the cache directory KIND/KEY; if there is none, runs `BUILDER… TMPDIR` (its stdout
# goes to stderr) and renames TMPDIR to it, so that an entry is either whole or absent. Callers of the same entry wait for
# one another. BUILDER may be a function; it runs in a bash of its own, with `set -euo pipefail` whatever the caller's
# context, all functions, and exported variables only.
cache_dir_for() {
    local kind=$1 key=$2 cache entry tmp
    shift 2
    cache=$(carom_cache)
    entry=$cache/$kind/$key
    if [[ ! -d $entry ]]; then
        mkdir -p "$cache/$kind"
        (
            flock 9
            [[ ! -d $entry ]] || exit 0
            find "$cache/$kind" -maxdepth 1 -name ".tmp-$key.*" -exec rm -rf {} +
            tmp=$(mktemp -d "$cache/$kind/.tmp-$key.XXXXXX")
            trap 'rm -rf "$tmp"' EXIT
            trap 'exit 130' INT
            trap 'exit 143' TERM
            chmod 755 "$tmp"
            # A new bash, because where this function is called in a condition, `set -e` has no effect in subshells.
            bash -euo pipefail -c "$(declare -f)"$'\n"$@"' "$0" "$@" "$tmp" >&2 9>&- || exit
            mv "$tmp" "$entry"
        ) 9>"$cache/$kind/.lock-$key" || die "could not make $kind/$key"
    fi
    printf '%s\n' "$entry"
}

# ---- Debian packages --------------------------------------------------------------------------------------------

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

# need_packages [-w WHY] PACKAGE…: installs those Debian packages that are missing, and says so.
need_packages() {
    local why='' pkg missing=()
    if [[ $1 == -w ]]; then
        why=" ($2)"
        shift 2
    fi
    command -v dpkg-query >/dev/null || die "this is no Debian system; install by hand what corresponds to: $*"
    for pkg; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$pkg" 2>/dev/null) == installed ]] || missing+=("$pkg")
    done
    ((${#missing[@]})) || return 0
    info "installing Debian packages$why: ${missing[*]}"
    local log
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

# need_command COMMAND PACKAGE [WHY]: installs PACKAGE unless COMMAND can be run already, wherever it came from.
need_command() {
    command -v "$1" >/dev/null || need_packages -w "${3:-for $1}" "$2"
}

# Suites that fetch_deb reads: fixed, so that all machines get the same kernels.
# What is nowhere else comes from a newer release's backports: sources of newer kernels.
export _fetch_suite=bookworm _fetch_newer=trixie-backports

# Prints lines `TYPE URI SUITE` for our suites on the Debian mirrors that this machine's own apt configuration names.
_debian_sources() {
    local uris archive security
    if [[ -n ${CAROM_DEBIAN_MIRROR:-} ]]; then
        archive=${CAROM_DEBIAN_MIRROR%/}
        security=${CAROM_DEBIAN_SECURITY_MIRROR:-$archive-security}
    else
        # shellcheck disable=SC2016 # apt expands it
        uris=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | sed 's,/*$,,' | sort -u)
        archive=$(grep -m1 -E '/debian$' <<<"$uris" || true)
        security=$(grep -m1 -E '/debian-security$|^[a-z]+://security\.[^/]*/debian-security$' <<<"$uris" || true)
    fi
    [[ -n $archive ]] || die "apt's configuration names no Debian mirror; set CAROM_DEBIAN_MIRROR to one (http://HOST/debian)"
    printf 'deb %s %s\n' "$archive" "$_fetch_suite" "$archive" "$_fetch_suite-updates" "$archive" "$_fetch_suite-backports" \
        "$archive" "$_fetch_newer"
    [[ -z $security ]] || printf 'deb %s %s\n' "$security" "$_fetch_suite-security"
    printf 'deb-src %s %s\n' "$archive" "$_fetch_suite-backports"
}

# private_apt COMMAND…: runs `apt-get` or `apt-cache` on sources and lists of our own; the machine's stay as they are.
private_apt() {
    local dir tool=$1
    shift
    dir=$(carom_cache)/apt
    local opts=(-o "Dir::Etc::sourcelist=$dir/sources.list" -o "Dir::Etc::sourceparts=/dev/null"
        -o "Dir::Etc::preferences=/dev/null" -o "Dir::Etc::preferencesparts=/dev/null"
        -o "Dir::State::lists=$dir/lists" -o "Dir::Cache=$dir/cache" -o "Acquire::Languages=none")
    # The unprivileged user that apt fetches as cannot enter a cache below root's home.
    ((EUID != 0)) || opts+=(-o "APT::Sandbox::User=root")
    "$tool" "${opts[@]}" "$@"
}

# Brings the private lists up to date: at most once a day, when the machine's sources or ours changed, or when asked by `force`.
_private_apt_update() {
    local dir ours keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    ours=$(declare -f _debian_sources | sha256sum)
    dir=$(carom_cache)/apt
    mkdir -p "$dir/lists/partial" "$dir/cache/archives/partial"
    [[ -e $keyring ]] || need_packages -w "keys of Debian's archive" debian-archive-keyring
    if [[ ${1:-} != force && -n $(find "$dir/updated" -mmin -1440 2>/dev/null) && $dir/sources.list -nt /etc/apt/sources.list.d &&
        $(head -n 1 "$dir/sources.list") == "# $ours" ]]; then
        return 0
    fi
    # The first line says which version of this script made it: several checkouts share a cache.
    (
        echo "# $ours"
        _debian_sources | sed "s, , [arch=amd64 signed-by=$keyring] ,;s,\$, main,"
    ) >"$dir/sources.list.new"
    mv "$dir/sources.list.new" "$dir/sources.list"
    progress "reading Debian's package lists"
    if private_apt apt-get update -qq >"$dir/update.log" 2>&1; then
        touch "$dir/updated"
    elif [[ -e $dir/updated ]]; then
        info "could not refresh Debian's package lists; going on with those of $(date -r "$dir/updated" +%F)"
    else
        cat "$dir/update.log" >&2
        die "could not read Debian's package lists"
    fi
}

_unpack_deb() {
    local package=$1 version=$2 tmp=$3
    progress "fetching Debian package $package $version"
    mkdir "$tmp/.deb"
    (cd "$tmp/.deb" && private_apt apt-get download -qq "$package=$version")
    progress "unpacking $package"
    dpkg -x "$tmp"/.deb/*.deb "$tmp"
    # dpkg -x gives the top directory the mode that the package has for '/'.
    rm -rf "$tmp/.deb"
}

# Brings the lists up to date, one caller at a time. Prints nothing; `force` as above.
_private_apt_refresh() {
    (
        flock 9
        _private_apt_update "$@"
    ) 9>"$(carom_cache)/.lock-apt"
}

# _apt_answer NAME COMMAND…: prints what COMMAND prints, from a file while the package lists have not changed since, as
# starting apt takes seconds.
_apt_answer() {
    local dir file answer
    command -v apt-get >/dev/null || die "this is no Debian system: apt-get is needed to fetch packages"
    _private_apt_refresh
    dir=$(carom_cache)/apt
    file=$dir/answer-${1//[^A-Za-z0-9.+-]/_}
    shift
    if [[ ! -s $file || ! $file -nt $dir/updated ]]; then
        answer=$("$@") || return
        printf '%s\n' "$answer" >"$file.$$"
        mv "$file.$$" "$file"
    fi
    cat "$file"
}

# debian_depends PACKAGE PATTERN: prints the first dependency of PACKAGE that matches the extended regular expression, to get
# from a meta package such as linux-image-amd64 to the package of the day.
debian_depends() {
    _apt_answer "depends-$1-$2" _apt_depends "$1" "$2"
}

_apt_depends() {
    private_apt apt-cache depends --important "$1" | sed -n 's/^ *Depends: //p' | grep -m1 -E "$2" ||
        die "Debian package $1 depends on nothing like $2"
}

# Backports are not candidates unless asked for by their suite.
_apt_candidate() {
    private_apt apt-cache ${2:+-t "$2"} policy "$1" | sed -n 's/^ *Candidate: //p' | grep -vxF '(none)' ||
        die "Debian ${2:-$_fetch_suite} has no package $1"
}

# fetch_deb PACKAGE [VERSION]: downloads a Debian package (newest of bookworm, its updates and security, or VERSION; signatures
# checked by apt), unpacks it into the cache without installing it, and prints the directory.
fetch_deb() {
    local package=$1 version=${2:-}
    [[ -n $version ]] || version=$(_apt_answer "candidate-$package" _apt_candidate "$package") || return
    cache_dir_for deb "${package}_${version//[^A-Za-z0-9.+~-]/_}" _fetch_deb_build "$package" "$version"
}

# fetch_backport PACKAGE: the same of the backports.
fetch_backport() {
    local suite=$_fetch_suite-backports version
    version=$(_apt_answer "candidate-$1-$suite" _apt_candidate "$1" "$suite") || return
    fetch_deb "$1" "$version"
}

# source_version PACKAGE: prints the newest version of a source package of the backports.
source_version() {
    _apt_answer "source-$1" _apt_source_version "$1"
}

_apt_source_version() {
    private_apt apt-cache showsrc --only-source "$1" | sed -n 's/^Version: //p' | sort -rV | head -n 1 | grep . ||
        die "Debian $_fetch_suite-backports has no source package $1"
}

# fetch_source PACKAGE VERSION DIR: downloads the original source of a Debian source package (its checksum is in the signed lists)
# and unpacks it as DIR, without Debian's changes.
fetch_source() {
    mkdir "$3"
    (cd "$3" && private_apt apt-get source -qq --tar-only --download-only "$1=$2")
    tar -C "$3" -xf "$3"/*.orig.tar.* --strip-components=1
    rm -f "$3"/*.orig.tar.*
}

_fetch_deb_build() {
    local package=$1 version=$2 tmp=$3
    if ! _unpack_deb "$package" "$version" "$tmp"; then
        # The mirror may have replaced the version since the lists were read.
        rm -rf "$tmp/.deb"
        _private_apt_refresh force
        _unpack_deb "$package" "$version" "$tmp"
    fi
}
