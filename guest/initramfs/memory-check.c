// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * memory-check dax FILE DEVICE: does direct I/O of 4 KiB at the start of DEVICE from and to pages
 * of FILE. FILE is on a file system that is mounted with -o dax. Prints a line for each case. The
 * exit status is 0 if all bytes are right.
 *
 * memory-check bar GROUP ADDRESS: maps the first page of BAR 0 of a PCI device for DMA of the same
 * device, unmaps the page, and maps it again. The device is in the IOMMU group GROUP and bound to
 * vfio-pci. The exit status is 0 on success.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/vfio.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 4 };

#define IOVA 0x10000000ull

static int failures;

static void check(const char *what, int good)
{
	if (good)
		printf("memory-check: %s: right\n", what);
	else
		printf("memory-check: %s: wrong: %s\n", what, strerror(errno));
	fflush(stdout);
	failures += !good;
}

static int fail(const char *what)
{
	perror(what);
	return 1;
}

static unsigned char at(int seed, size_t i)
{
	return seed * 77 + i * 7 + (i >> 8);
}

static void fill(unsigned char *page, int seed)
{
	for (size_t i = 0; i < PAGE; i++)
		page[i] = at(seed, i);
}

static int is_filled(const unsigned char *page, int seed)
{
	for (size_t i = 0; i < PAGE; i++)
		if (page[i] != at(seed, i))
			return 0;
	return 1;
}

static int dax(const char *path, const char *device)
{
	int file = open(path, O_RDWR | O_CREAT, 0600);
	int disk = open(device, O_RDWR | O_DIRECT);
	unsigned char *own, *pages;

	if (file < 0 || disk < 0)
		return fail("open");
	if (posix_fallocate(file, 0, PAGES * PAGE))
		return fail("fallocate");
	pages = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (pages == MAP_FAILED)
		return fail("mmap");
	own = aligned_alloc(PAGE, PAGE);
	if (!own)
		return fail("aligned_alloc");

	fill(pages + PAGE, 1);
	check("written from a file's page", pwrite(disk, pages + PAGE, PAGE, 0) == PAGE);
	memset(own, 0, PAGE);
	check("data read back", pread(disk, own, PAGE, 0) == PAGE && is_filled(own, 1));
	fill(own, 2);
	check("written from memory", pwrite(disk, own, PAGE, 0) == PAGE);
	check("read into a file's page", pread(disk, pages + 2 * PAGE, PAGE, 0) == PAGE && is_filled(pages + 2 * PAGE, 2));
	check("read data is in the file", pread(file, own, PAGE, 2 * PAGE) == PAGE && is_filled(own, 2));
	return failures != 0;
}

static int bar(const char *number, const char *address)
{
	struct vfio_region_info region = { .argsz = sizeof(region), .index = VFIO_PCI_BAR0_REGION_INDEX };
	struct vfio_iommu_type1_dma_map map = { .argsz = sizeof(map), .size = PAGE, .iova = IOVA };
	struct vfio_iommu_type1_dma_unmap unmap = { .argsz = sizeof(unmap), .size = PAGE, .iova = IOVA };
	char path[64];
	int container, group, device;
	void *page;

	snprintf(path, sizeof(path), "/dev/vfio/%d", atoi(number));
	container = open("/dev/vfio/vfio", O_RDWR);
	group = open(path, O_RDWR);
	if (container < 0 || group < 0)
		return fail(path);
	if (ioctl(group, VFIO_GROUP_SET_CONTAINER, &container) ||
	    ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU))
		return fail("VFIO_SET_IOMMU");
	device = ioctl(group, VFIO_GROUP_GET_DEVICE_FD, address);
	if (device < 0 || ioctl(device, VFIO_DEVICE_GET_REGION_INFO, &region))
		return fail("VFIO_DEVICE_GET_REGION_INFO");
	page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, device, region.offset);
	if (page == MAP_FAILED)
		return fail("mmap");
	map.vaddr = (uintptr_t)page;
	map.flags = VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE;
	check("a page of the BAR is mapped", !ioctl(container, VFIO_IOMMU_MAP_DMA, &map));
	check("the page is unmapped", !ioctl(container, VFIO_IOMMU_UNMAP_DMA, &unmap) && unmap.size == PAGE);
	check("the page is mapped again", !ioctl(container, VFIO_IOMMU_MAP_DMA, &map));
	return failures != 0;
}

int main(int argc, char **argv)
{
	if (argc == 4 && !strcmp(argv[1], "dax"))
		return dax(argv[2], argv[3]);
	if (argc == 4 && !strcmp(argv[1], "bar"))
		return bar(argv[2], argv[3]);
	fprintf(stderr, "usage: memory-check dax FILE DEVICE\n       memory-check bar GROUP ADDRESS\n");
	return 2;
}
