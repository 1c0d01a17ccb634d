# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# shellcheck shell=bash
#
# The rig's emulator: QEMU from Debian's source, with a mistake in its emulation of nested guests mended. Source it after
# common.sh.
#
# The mistake: `helper_vmrun` (target/i386/tcg/system/svm_helper.c of QEMU 10.0) delivers the interrupt that KVM injects, and leaves
# its vector where the CPU's loop looks for exceptions that are still to be delivered. Should another thread ask the CPU to leave
# that loop before the guest's next exception or exit, as each interrupt of a device does, and do so between the loop's look at
# interrupts and its look at such requests (`cpu_handle_interrupt`, accel/tcg/cpu-exec.c), then the guest gets the interrupt a second
# time, even where it has interrupts off. At the first instruction of a kernel's entry that is a double fault.

# mended_qemu: prints the directory of qemu-system-x86_64, built where it is missing.
mended_qemu() {
    local version
    version=$(source_version qemu) || return
    cache_dir_for qemu "$(content_key "=$version" "=$(declare -f build_qemu mend_qemu)" "$CAROM_ROOT/scripts/lib/qemu-build.txt")" build_qemu "$version"
}

# build_qemu VERSION DIR: with what the rig uses, and nothing else that is optional.
build_qemu() {
    local dir=$2 tree=$2/tree line release=${1#*:}
    release=${release%%+*}
    need_packages -w "building the rig's emulator" gcc libc6-dev python3-venv ninja-build pkg-config \
        libglib2.0-dev zlib1g-dev libattr1-dev libslirp-dev libfdt-dev
    progress "fetching QEMU $release"
    fetch_source qemu "$1" "$tree"
    mend_qemu "$tree"
    progress "configuring QEMU $release"
    python3 -m venv "$dir/python"
    "$dir/python/bin/python" -m pip install --quiet --disable-pip-version-check -r "$CAROM_ROOT/scripts/lib/qemu-build.txt"
    (cd "$tree" && ./configure --python="$dir/python/bin/python" --target-list=x86_64-softmmu --without-default-features \
        --disable-download --disable-docs --disable-tools --disable-debug-info --disable-werror --disable-install-blobs \
        --enable-tcg --enable-virtfs --enable-attr --enable-slirp --enable-fdt=system) >"$dir/log" 2>&1 || {
        tail -n 20 "$dir/log"
        return 1
    }
    ninja -C "$tree/build" qemu-system-x86_64 2>&1 | while IFS= read -r line; do
        printf '%s\n' "$line" >>"$dir/log"
        [[ ! $line =~ ^\[([0-9]+)/([0-9]+)\] ]] || progress "compiling QEMU $release: step ${BASH_REMATCH[1]} of ${BASH_REMATCH[2]}"
    done || {
        tail -n 20 "$dir/log"
        return 1
    }
    strip -o "$dir/qemu-system-x86_64" "$tree/build/qemu-system-x86_64"
    rm -rf "$tree" "$dir/python"
    progress_end
}

# mend_qemu TREE: has the vector forgotten once the interrupt is delivered. Debian's source comes without the firmware that one of the
# build's files names.
mend_qemu() {
    local file=$1/target/i386/tcg/system/svm_helper.c delivery='do_interrupt_x86_hardirq(env, vector, 1);'
    [[ $(grep -cF "$delivery" "$file") == 1 ]] || die "$file: not one '$delivery'"
    sed -i "s/$delivery/& cs->exception_index = -1;/" "$file"
    echo 'roms = []' >"$1/pc-bios/meson.build"
}
