#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#
# Wrapper of the VMM. libvirt starts this script as "cloud-hypervisor --api-socket fd=N --event-monitor path=FIFO". The test's recorder,
# which is in the same directory, forwards connections from libvirt's socket to another socket of the VMM.
here=$(dirname "$0")
case $1 in
--api-socket) fd=${2#fd=} && shift 2 ;;
*) exec "$here/carom/cloud-hypervisor" "$@" ;;
esac
export CAROM_LIBVIRT_DIRECTORY="$here" CAROM_LIBVIRT_LISTENER="$fd" CAROM_LIBVIRT_VMM="$here/api-$$.sock"
"$here/recorder" --exact recorder >>"$here/recorder.log" 2>&1 &
exec "$here/carom/cloud-hypervisor" --api-socket "path=$CAROM_LIBVIRT_VMM" "$@"
