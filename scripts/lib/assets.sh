# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# shellcheck shell=bash
#
# What guests need, built where it is missing: the VMM, guest kernels, initramfs. Source it after common.sh. The functions
# export the variables that tests/integration/src/site.rs reads.

# build_tools: what the builds below need from Debian, and Rust.
build_tools() {
    need_packages -w "building and running guests" qemu-system-x86 fio gcc libc6-dev
    need_rust
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
    need_packages -w "fetching Rust" curl ca-certificates
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

# quietly LOG COMMAND…: runs it with stdout and stderr to LOG, which is shown if it fails.
quietly() {
    local log=$1
    shift
    "$@" >"$log" 2>&1 || {
        progress_end
        tail -n 40 "$log" >&2
        die "failed: $*"
    }
}

# target_dir: where cargo puts what it builds.
target_dir() {
    cargo metadata --format-version 1 --no-deps --manifest-path "$CAROM_ROOT/Cargo.toml" |
        grep -o '"target_directory":"[^"]*"' | cut -d'"' -f4
}

# build_rig: the programs that start the emulated machine and run the tests in it. Needs a linker and cargo.
build_rig() {
    need_packages -w "building" gcc libc6-dev
    need_rust
    progress "building the rig's supervisor"
    quietly "$(carom_cache)/rig-build.$$.log" cargo build --locked --manifest-path "$CAROM_ROOT/Cargo.toml" -p carom-integration --bin rig --bin guest-tests
    rm -f "$(carom_cache)/rig-build.$$.log"
    CAROM_RIG_PROGRAM=$(target_dir)/debug/rig CAROM_GUEST_TESTS=$(target_dir)/debug/guest-tests
    export CAROM_RIG_PROGRAM CAROM_GUEST_TESTS
    progress_end
}

# build_carom: the VMM, optimized.
build_carom() {
    progress "building carom"
    quietly "$(carom_cache)/carom-build.log" cargo build --release --locked --manifest-path "$CAROM_ROOT/Cargo.toml" -p vmm --bin carom
    CAROM_BIN=$(target_dir)/release/carom
    export CAROM_BIN
}

# build_remote: the VMM's command-line client.
build_remote() {
    progress "building carom-remote"
    quietly "$(carom_cache)/carom-build.log" cargo build --release --locked --manifest-path "$CAROM_ROOT/Cargo.toml" -p carom-remote
    CAROM_REMOTE=$(target_dir)/release/carom-remote
    export CAROM_REMOTE
}

# build_guest: the patched kernel and its initramfs.
build_guest() {
    CAROM_GUEST_KERNEL=$("$CAROM_ROOT/scripts/guest-kernel")
    build_guest_initramfs
}

# build_profiled_guest: the same with the function profiler.
build_profiled_guest() {
    CAROM_GUEST_KERNEL=$("$CAROM_ROOT/scripts/guest-kernel" --profile)
    build_guest_initramfs
}

# build_guest_initramfs: what goes with CAROM_GUEST_KERNEL.
build_guest_initramfs() {
    CAROM_GUEST_INITRAMFS=$("$CAROM_ROOT/scripts/guest-initramfs")
    export CAROM_GUEST_KERNEL CAROM_GUEST_INITRAMFS
}

# build_newer_guest: the patched kernel of the newest series that there is a patch for.
build_newer_guest() {
    local dir
    dir=$("$CAROM_ROOT/scripts/guest-kernel" --series 7.3)
    export CAROM_NEWER_KERNEL=$dir/bzImage
}

# build_stock_guest: Debian's kernel as it is, and an initramfs with modules of it. Not bookworm's first kernel, 6.1: that
# one is built without virtio-iommu.
build_stock_guest() {
    local dir
    dir=$(fetch_deb "$(debian_depends linux-image-6.12-amd64 '^linux-image-6\.12')")
    CAROM_STOCK_KERNEL=$(echo "$dir"/boot/vmlinuz-*)
    CAROM_STOCK_INITRAMFS=$("$CAROM_ROOT/scripts/guest-initramfs" --modules "$dir/lib/modules/${CAROM_STOCK_KERNEL##*/vmlinuz-}" --with pvpanic_pci)
    export CAROM_STOCK_KERNEL CAROM_STOCK_INITRAMFS
}

# build_edu_dma: the program that steers the edu device in a guest.
build_edu_dma() {
    local source=$CAROM_ROOT/tests/integration/guest/edu-dma.c dir
    dir=$(cache_dir_for edu-dma "$(content_key "$source")" compile_edu_dma "$source")
    export CAROM_EDU_DMA=$dir/edu-dma
}

# compile_edu_dma SOURCE DIR
compile_edu_dma() {
    gcc -O2 -static -Wall -Wextra -Werror -o "$2/edu-dma" "$1"
}

# host_machine: one line about this machine.
host_machine() {
    printf '%s, %s CPUs, %s GiB\n' \
        "$(sed -n 's/^model name[[:space:]]*: //p' /proc/cpuinfo | head -n 1)" "$(nproc)" \
        "$(awk '/^MemTotal:/ { printf "%.0f", $2 / 1048576 }' /proc/meminfo)"
}
