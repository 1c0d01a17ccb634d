#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#
# Runs libvirt's daemon for its ch driver in separate namespaces, and virsh:
#
#	unshare --mount --net --pid --fork --mount-proc --propagation private session.sh PREFIX DIRECTORY
#
# PREFIX is libvirt's installation directory. DIRECTORY is the directory of the test. Each line of the standard input contains arguments of
# virsh. The script prints the output of virsh and a line "status N". When the script ends, the daemon ends too.
set -u
prefix=$1 directory=$2
PATH=$directory:$prefix/bin:$prefix/sbin:$PATH
export PATH
for place in /run "$prefix/etc/libvirt" "$prefix/var"; do
	mount -t tmpfs tmpfs "$place" || exit 1
done
# The daemon would use all available cgroup controllers, and leave groups behind. So hide the cgroup file system from the daemon.
if mountpoint --quiet /sys/fs/cgroup; then
	umount --recursive --lazy /sys/fs/cgroup || exit 1
fi
ip link set lo up
mkdir -p /run/libvirt /run/lock "$prefix/var/log/libvirt/ch" "$prefix/var/lib/libvirt/ch" "$prefix/var/cache/libvirt"
cat >/run/virtchd.conf <<END
unix_sock_dir = "/run/libvirt"
auth_unix_ro = "none"
auth_unix_rw = "none"
log_outputs = "3:file:$directory/virtchd.log"
END
: >/run/virtlogd.conf
virtlogd --daemon --pid-file /run/virtlogd.pid --config /run/virtlogd.conf || exit 1
virtchd --daemon --pid-file /run/virtchd.pid --config /run/virtchd.conf || exit 1
for _ in 0 1 2 3 4 5 6 7 8 9; do
	[ -S /run/libvirt/virtchd-sock ] && break
	sleep 1
done
while read -r line; do
	# The words of a line are arguments.
	# shellcheck disable=SC2086
	timeout 60 virsh --quiet --connect "ch+unix:///system?socket=/run/libvirt/virtchd-sock" $line </dev/null 2>&1
	echo "status $?"
done
