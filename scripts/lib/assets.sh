# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# shellcheck shell=bash
#
# What guests need, built where it is missing: the VMM, guest kernels, initramfs. Source it after common.sh. The functions
# export the variables that tests/integration/src/site.rs reads.

# build_tools: what the builds below need from Debian, and Rust.
build_tools() {
    need_packages -w "building and running guests" qemu-system-x86 fio gcc libc6-dev
    command -v cargo >/dev/null || die "no cargo: install Rust $(rust_version) or newer (https://rustup.rs)"
}

# rust_version: the oldest Rust that the workspace builds with.
rust_version() {
    sed -n 's/^rust-version = "\(.*\)"/\1/p' "$CAROM_ROOT/Cargo.toml"
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

# build_carom: the VMM, optimized.
build_carom() {
    progress "building carom"
    quietly "$(carom_cache)/carom-build.log" cargo build --release --locked --manifest-path "$CAROM_ROOT/Cargo.toml" -p vmm --bin carom
    CAROM_BIN=$(target_dir)/release/carom
    export CAROM_BIN
}

# build_guest: the patched kernel and its initramfs.
build_guest() {
    CAROM_GUEST_KERNEL=$("$CAROM_ROOT/scripts/guest-kernel")
    CAROM_GUEST_INITRAMFS=$("$CAROM_ROOT/scripts/guest-initramfs")
    export CAROM_GUEST_KERNEL CAROM_GUEST_INITRAMFS
}

# build_stock_guest: Debian's kernel as it is, and an initramfs with modules of it. Not bookworm's first kernel, 6.1: that
# one is built without virtio-iommu.
build_stock_guest() {
    local dir
    dir=$(fetch_deb "$(debian_depends linux-image-6.12-amd64 '^linux-image-6\.12')")
    CAROM_STOCK_KERNEL=$(echo "$dir"/boot/vmlinuz-*)
    CAROM_STOCK_INITRAMFS=$("$CAROM_ROOT/scripts/guest-initramfs" --modules "$dir/lib/modules/${CAROM_STOCK_KERNEL##*/vmlinuz-}")
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
