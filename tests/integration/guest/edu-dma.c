// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Makes QEMU's edu device do DMA at given addresses, from inside a guest, to test which memory it can access.
 *
 *   edu-dma vfio ADDRESS…  moves one or two devices from the guest's vfio-pci to a domain of their own. `map` and `unmap`
 *                          work with any device
 *   edu-dma raw ADDRESS    leaves the device in its present domain, and only accesses its registers
 *
 * Reads commands from stdin, one per line, and prints `CAROM-EDU <command> <result>` for each. Numbers have the format of
 * strtoull(3). Addresses are bus addresses of the device. Commands transfer, fill and count only the first half of a page,
 * because QEMU up to 8.0 aborts on a transfer of the device's whole buffer. It wrongly takes this transfer for one beyond
 * the buffer's end.
 *
 *   use N                  selects device N, 0 or 1, for later commands
 *   map ADDRESS r|w|rw     maps a new page at ADDRESS (vfio only), and prints "ok" or the error
 *   unmap ADDRESS          unmaps a page that `map` mapped
 *   fill ADDRESS BYTE      fills the page at ADDRESS with BYTE, by the CPU
 *   count ADDRESS BYTE     prints how many bytes of the page at ADDRESS are BYTE
 *   victim ADDRESS BYTE    maps the page of RAM at this GPA for the CPU, and fills the page. No device has the page mapped.
 *                          The kernel must not use the page (memmap=64K$ADDRESS)
 *   victim-count BYTE      prints how many bytes of the victim page are BYTE
 *   load ADDRESS           DMA from ADDRESS (a number, or `victim`) to the device's buffer
 *   store ADDRESS          DMA from the device's buffer to ADDRESS (a number, or `victim`)
 *
 * Registers of the device: QEMU docs/specs/edu.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/vfio.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define TRANSFER (PAGE / 2)
#define BAR_SIZE 0x100000UL
#define REG_ID 0x00
#define REG_DMA_SOURCE 0x80
#define REG_DMA_TARGET 0x88
#define REG_DMA_COUNT 0x90
#define REG_DMA_COMMAND 0x98
#define DMA_START 1UL
#define DMA_TO_MEMORY 2UL
#define DEVICE_BUFFER 0x40000UL
#define MAX_MAPS 16
#define MAX_DEVICES 2

static volatile uint8_t *bars[MAX_DEVICES];
/* Registers of the device in use. */
static volatile uint8_t *bar;
static int container = -1;
static volatile unsigned char *victim;
static uint64_t victim_address;
static struct mapping {
	uint64_t address;
	unsigned char *page;
} maps[MAX_MAPS];

static void fail(const char *what)
{
	printf("CAROM-EDU-ERROR %s: %s\n", what, strerror(errno));
	exit(1);
}

static unsigned char *new_page(void)
{
	unsigned char *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE,
				   MAP_PRIVATE | MAP_ANONYMOUS | MAP_LOCKED | MAP_POPULATE, -1, 0);

	if (page == MAP_FAILED)
		fail("cannot allocate a page");
	return page;
}

static void write_register(unsigned long offset, uint64_t value)
{
	*(volatile uint64_t *)(bar + offset) = value;
}

static uint64_t read_register(unsigned long offset)
{
	return *(volatile uint64_t *)(bar + offset);
}

/* Opens the device in its present domain: maps its registers and enables bus mastering, by sysfs. */
static void open_raw(const char *address)
{
	char path[128];
	uint16_t command;
	int fd;

	snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/enable", address);
	fd = open(path, O_WRONLY);
	if (fd < 0 || write(fd, "1", 1) != 1)
		fail(path);
	close(fd);
	snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/config", address);
	fd = open(path, O_RDWR);
	if (fd < 0 || pread(fd, &command, 2, 4) != 2)
		fail(path);
	command |= 0x6; /* memory space, bus master */
	if (pwrite(fd, &command, 2, 4) != 2)
		fail(path);
	close(fd);
	snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/resource0", address);
	fd = open(path, O_RDWR | O_SYNC);
	if (fd < 0)
		fail(path);
	bar = mmap(NULL, BAR_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (bar == MAP_FAILED)
		fail("cannot map the registers");
}

/* Opens a device by VFIO. All devices share one container with type 1 mappings. */
static void open_vfio(const char *address)
{
	struct vfio_region_info region = { .argsz = sizeof(region) };
	char path[128], link[256];
	int group, device, first = 0;
	uint16_t command;
	ssize_t length;

	snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/iommu_group", address);
	length = readlink(path, link, sizeof(link) - 1);
	if (length < 0)
		fail(path);
	link[length] = 0;
	if (container < 0) {
		container = open("/dev/vfio/vfio", O_RDWR);
		first = 1;
	}
	snprintf(path, sizeof(path), "/dev/vfio/%s", strrchr(link, '/') + 1);
	group = open(path, O_RDWR);
	if (container < 0 || group < 0)
		fail(path);
	if (ioctl(group, VFIO_GROUP_SET_CONTAINER, &container))
		fail("cannot add the group to the container");
	if (first && ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU))
		fail("cannot set the IOMMU type");
	device = ioctl(group, VFIO_GROUP_GET_DEVICE_FD, address);
	if (device < 0)
		fail("cannot open the device");
	region.index = VFIO_PCI_CONFIG_REGION_INDEX;
	if (ioctl(device, VFIO_DEVICE_GET_REGION_INFO, &region))
		fail("cannot find the configuration space");
	if (pread(device, &command, 2, region.offset + 4) != 2)
		fail("cannot read the command register");
	command |= 0x6;
	if (pwrite(device, &command, 2, region.offset + 4) != 2)
		fail("cannot write the command register");
	region.index = VFIO_PCI_BAR0_REGION_INDEX;
	if (ioctl(device, VFIO_DEVICE_GET_REGION_INFO, &region))
		fail("cannot find the registers");
	bar = mmap(NULL, region.size, PROT_READ | PROT_WRITE, MAP_SHARED, device, region.offset);
	if (bar == MAP_FAILED)
		fail("cannot map the registers");
}

static struct mapping *find(uint64_t address)
{
	for (int i = 0; i < MAX_MAPS; i++)
		if (maps[i].page && maps[i].address == address)
			return &maps[i];
	return NULL;
}

static const char *map(uint64_t address, const char *permission)
{
	struct vfio_iommu_type1_dma_map request = { .argsz = sizeof(request), .iova = address, .size = PAGE };
	struct mapping *entry = NULL;

	for (int i = 0; i < MAX_MAPS && !entry; i++)
		if (!maps[i].page)
			entry = &maps[i];
	if (!entry)
		return "too many";
	entry->page = new_page();
	entry->address = address;
	request.vaddr = (uintptr_t)entry->page;
	if (strchr(permission, 'r'))
		request.flags |= VFIO_DMA_MAP_FLAG_READ;
	if (strchr(permission, 'w'))
		request.flags |= VFIO_DMA_MAP_FLAG_WRITE;
	if (ioctl(container, VFIO_IOMMU_MAP_DMA, &request)) {
		entry->page = NULL;
		return strerror(errno);
	}
	return "ok";
}

static const char *unmap(uint64_t address)
{
	struct vfio_iommu_type1_dma_unmap request = { .argsz = sizeof(request), .iova = address, .size = PAGE };

	if (ioctl(container, VFIO_IOMMU_UNMAP_DMA, &request))
		return strerror(errno);
	return request.size == PAGE ? "ok" : "nothing there";
}

static unsigned int count(const volatile unsigned char *page, unsigned char byte)
{
	unsigned int n = 0;

	for (unsigned long i = 0; i < TRANSFER; i++)
		n += page[i] == byte;
	return n;
}

static void take_victim(uint64_t address, unsigned char byte)
{
	int fd = open("/dev/mem", O_RDWR);

	victim = fd < 0 ? MAP_FAILED : mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)address);
	if (victim == MAP_FAILED)
		fail("cannot map the victim from /dev/mem");
	close(fd);
	victim_address = address;
	for (unsigned long i = 0; i < TRANSFER; i++)
		victim[i] = byte;
}

static const char *dma(uint64_t source, uint64_t target, uint64_t direction)
{
	struct timespec pause = { .tv_nsec = 10 * 1000 * 1000 };

	write_register(REG_DMA_SOURCE, source);
	write_register(REG_DMA_TARGET, target);
	write_register(REG_DMA_COUNT, TRANSFER);
	write_register(REG_DMA_COMMAND, DMA_START | direction);
	for (int i = 0; i < 1000; i++) {
		if (!(read_register(REG_DMA_COMMAND) & DMA_START))
			return "done";
		nanosleep(&pause, NULL);
	}
	return "never ended";
}

static void execute(const char *name, const char *first, const char *second)
{
	uint64_t address = strcmp(first, "victim") ? strtoull(first, NULL, 0) : victim_address;
	unsigned char byte = strtoul(*second ? second : first, NULL, 0) & 0xff;
	struct mapping *entry = find(address);

	printf("CAROM-EDU %s %s%s%s ", name, first, *second ? " " : "", second);
	if (!strcmp(name, "use") && address < MAX_DEVICES && bars[address]) {
		bar = bars[address];
		puts("ok");
	} else if (!strcmp(name, "map") && container >= 0) {
		puts(map(address, second));
	} else if (!strcmp(name, "unmap") && entry) {
		puts(unmap(address));
	} else if (!strcmp(name, "fill") && entry) {
		memset(entry->page, byte, TRANSFER);
		puts("ok");
	} else if (!strcmp(name, "count") && entry) {
		printf("%u\n", count(entry->page, byte));
	} else if (!strcmp(name, "victim")) {
		take_victim(address, byte);
		puts("ok");
	} else if (!strcmp(name, "victim-count") && victim) {
		printf("%u\n", count(victim, byte));
	} else if (!strcmp(name, "load")) {
		puts(dma(address, DEVICE_BUFFER, 0));
	} else if (!strcmp(name, "store")) {
		puts(dma(DEVICE_BUFFER, address, DMA_TO_MEMORY));
	} else {
		puts("bad command");
	}
}

int main(int argc, char **argv)
{
	char line[256], name[32], first[64], second[64];

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc >= 3 && argc <= 2 + MAX_DEVICES && !strcmp(argv[1], "vfio")) {
		for (int i = 2; i < argc; i++) {
			open_vfio(argv[i]);
			bars[i - 2] = bar;
		}
		bar = bars[0];
	} else if (argc == 3 && !strcmp(argv[1], "raw")) {
		open_raw(argv[2]);
	} else {
		fprintf(stderr, "usage: edu-dma vfio ADDRESS [ADDRESS], or edu-dma raw ADDRESS\n");
		return 2;
	}
	printf("CAROM-EDU id 0x%x\n", *(volatile uint32_t *)(bar + REG_ID));
	while (fgets(line, sizeof(line), stdin)) {
		first[0] = second[0] = 0;
		if (sscanf(line, "%31s %63s %63s", name, first, second) >= 1)
			execute(name, first, second);
	}
	return 0;
}
