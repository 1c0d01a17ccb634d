#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#
# Container host in its own namespaces, for kata_runtime.rs: starts containerd with an image that contains busybox. Kata Containers'
# shim runs its containers on Carom. Then runs the steps of standard input.
#   host.sh DIR RUNTIME: DIR contains the files of the test, RUNTIME the programs (docs/kata.md)
set -euo pipefail
shopt -s inherit_errexit
dir=$1
runtime=$2
image=localhost/small:1
export PATH=$runtime:$PATH:/usr/sbin:/sbin
export CONTAINERD_ADDRESS=$dir/containerd.sock

mount --make-rshared /
mount -t tmpfs -o mode=755 tmpfs /run
mountpoint -q /sys/fs/cgroup || mount -t cgroup2 cgroup2 /sys/fs/cgroup
ip link set lo up
# The shim and virtiofsd do not start without a system log.
mkdir -p /run/systemd/journal
"$runtime/busybox" syslogd -n -O "$dir/syslog" &
until [[ -S /dev/log ]]; do sleep 0.1; done

# Image in the format of the Open Container Initiative: one layer with busybox.
blob() {
    local sum
    sum=$(sha256sum <"$1" | cut -d' ' -f1)
    mv "$1" "$dir/image/blobs/sha256/$sum"
    echo "\"digest\":\"sha256:$sum\",\"size\":$(stat -c %s "$dir/image/blobs/sha256/$sum")"
}
mount -t tmpfs -o mode=755 tmpfs "$dir/containerd"
mkdir -p "$dir"/image/blobs/sha256 "$dir"/root/{bin,proc,sys,dev,tmp}
cp "$runtime/busybox" "$dir/root/bin/busybox"
for name in $("$runtime/busybox" --list); do
    [[ $name == busybox ]] || ln -s busybox "$dir/root/bin/$name"
done
tar -C "$dir/root" -cf "$dir/layer" .
diff=$(sha256sum <"$dir/layer" | cut -d' ' -f1)
layer=$(blob "$dir/layer")
echo '{"architecture":"amd64","os":"linux","config":{"Env":["PATH=/bin"],"Cmd":["sh"]},
    "rootfs":{"type":"layers","diff_ids":["sha256:'"$diff"'"]}}' >"$dir/config"
config=$(blob "$dir/config")
echo '{"schemaVersion":2,"config":{"mediaType":"application/vnd.oci.image.config.v1+json",'"$config"'},
    "layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar",'"$layer"'}]}' >"$dir/manifest"
manifest=$(blob "$dir/manifest")
echo '{"schemaVersion":2,"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json",'"$manifest"',
    "annotations":{"io.containerd.image.name":"'$image'"}}]}' >"$dir/image/index.json"
echo '{"imageLayoutVersion":"1.0.0"}' >"$dir/image/oci-layout"
tar -C "$dir/image" -cf "$dir/image.tar" .

containerd -c "$dir/containerd.toml" >"$dir/containerd.log" 2>&1 &
for _ in {1..300}; do
    ! ctr version >/dev/null 2>&1 || break
    sleep 0.2
done
ctr image import "$dir/image.tar" >&2

# Runs a container: NAME [OPTION…] -- COMMAND…
run() {
    local name=$1 options=()
    shift
    while [[ $1 != -- ]]; do
        options+=("$1")
        shift
    done
    shift
    ctr run --rm --runtime "$runtime/containerd-shim-kata-v2" --runtime-config-path "$dir/kata.toml" "${options[@]}" "$image" "$name" "$@"
}

# Calls the API of a container's VMM: NAME ARGUMENT…
remote() {
    local socket=/run/vc/vm/$1/clh-api.sock
    shift
    CAROM_API_SOCKET=$socket "$CAROM_REMOTE" "$@"
}

# Prints the path on this host of a file in a container's root file system: PID of its `ctr`, NAME
file_of_container() {
    local file
    while true; do
        file=$(find "$dir/containerd/root/io.containerd.snapshotter.v1.overlayfs/snapshots" -path "*/fs/$2")
        [[ -z $file ]] || break
        kill -0 "$1" || return 1
        sleep 0.5
    done
    echo "$file"
}

count_vmms() {
    pgrep -fc '^[^ ]*/cloud-hypervisor ' || true
}

say() {
    echo "CAROM-KATA $*"
}

eval "$(cat)"
