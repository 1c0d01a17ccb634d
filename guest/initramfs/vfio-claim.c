// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * vfio-claim GROUP [SECONDS]: adds an IOMMU group to a VFIO container, and releases it after
 * SECONDS. This moves the group's devices out of their DMA domain and back. The exit status is 0 on
 * success.
 */
#include <fcntl.h>
#include <linux/vfio.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

static int fail(const char *what)
{
	perror(what);
	return 1;
}

int main(int argc, char **argv)
{
	char path[64];
	int container, group;

	if (argc < 2) {
		fprintf(stderr, "usage: vfio-claim GROUP [SECONDS]\n");
		return 2;
	}
	snprintf(path, sizeof(path), "/dev/vfio/%d", atoi(argv[1]));
	container = open("/dev/vfio/vfio", O_RDWR);
	if (container < 0)
		return fail("/dev/vfio/vfio");
	group = open(path, O_RDWR);
	if (group < 0)
		return fail(path);
	if (ioctl(group, VFIO_GROUP_SET_CONTAINER, &container))
		return fail("VFIO_GROUP_SET_CONTAINER");
	if (ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU))
		return fail("VFIO_SET_IOMMU");
	if (argc > 2)
		sleep(atoi(argv[2]));
	return 0;
}
