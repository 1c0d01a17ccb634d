// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * A guest that repeatedly reads blocks of BLOCK bytes from a virtio disk and prints the duration.
 * The guest sends one request at a time, then 64 requests at a time. The guest polls for
 * completions, so that interrupts take no time. Each line has two hexadecimal numbers. The first
 * number is the number of requests that are sent at a time. The second number is the duration of
 * READS requests in cycles of the time stamp counter.
 *
 * With a virtio-iommu, the guest maps the queue for the disk once, and the disk writes the data to a bounce window.
 */
#include "guest.h"

/* Vendor and device ID of a disk and of the virtio-iommu. */
#define DISK 0x10421af4u
#define IOMMU 0x10571af4u
#define QUEUE_SIZE 256
#define READS 2048
/* Length of the disk in bytes. The guest reads the whole disk. */
#define DISK_LEN 0x2000000u
#define BLOCKS (DISK_LEN / BLOCK)
/* Length of all buffers in bytes: at most one chunk. Large blocks share buffers, because nothing checks the data. */
#define BUFFERS_LEN 0x200000u
#define TABLE 0x1000000u
#define AVAILABLE 0x1001000u
#define USED 0x1002000u
#define HEADERS 0x1003000u
#define STATUSES 0x1004000u
#define DATA 0x1100000u
/* Addresses of the virtio-iommu's queue, of a request and of the request's tail. */
#define IOMMU_TABLE 0x1200000u
#define IOMMU_AVAILABLE 0x1201000u
#define IOMMU_USED 0x1202000u
#define REQUEST 0x1203000u
#define TAIL 0x1203100u
/* VIRTIO_IOMMU_F_MAP_UNMAP, and VIRTIO_IOMMU_F_BOUNCE_WINDOW for windows below 4 GiB. */
#define IOMMU_FEATURES (1u << 2 | 1u << 23)
#define ATTACH 1
#define MAP 3
#define WINDOW_ADD 0x40
/* Offsets of the device configuration and the notification register in the BAR. */
#define CONFIG 0x2000
#define NOTIFY 0x3000
/* Flag that the device sets while it needs no notifications. */
#define NO_NOTIFY 1

static uint16_t available, used;
static uint32_t block;

static void submit(uint32_t request)
{
	/* The blocks are not consecutive, because the host would merge reads of consecutive blocks into one request. */
	block = (block + BLOCKS / 2 + 1) % BLOCKS;
	MEM32(HEADERS + 16 * request + 8) = block * (BLOCK / 512);
	MEM16(AVAILABLE + 4 + 2 * (available++ % QUEUE_SIZE)) = 3 * request;
}

/* Makes the submitted requests visible to the device. */
static void publish(uint32_t notify)
{
	__asm__ volatile("" ::: "memory");
	MEM16(AVAILABLE + 2) = available;
	__asm__ volatile("lock addl $0, (%%esp)" ::: "memory", "cc");
	if (!(MEM16(USED) & NO_NOTIFY))
		MEM16(notify) = 0;
}

static void read_blocks(uint32_t notify, uint32_t depth)
{
	uint32_t left = READS - depth, done = 0, request;

	for (request = 0; request < depth; request++)
		submit(request);
	publish(notify);
	while (done < READS) {
		uint16_t end = MEM16(USED + 2), begin = used;

		for (; used != end; used++, done++) {
			request = MEM32(USED + 4 + 8 * (used % QUEUE_SIZE)) / 3;
			if (MEM8(STATUSES + request))
				say('!');
			if (left) {
				left--;
				submit(request);
			}
		}
		if (used != begin)
			publish(notify);
		else
			relax();
	}
}

/*
 * Sends the request at REQUEST for domain 1, with this type, and waits for the answer. The request has `len` bytes, and its tail has
 * `tail` bytes.
 */
static void request_of(uint32_t common, uint32_t type, uint32_t len, uint32_t tail)
{
	static uint16_t sent;

	MEM32(REQUEST) = type;
	MEM32(REQUEST + 4) = 1;
	MEM32(IOMMU_TABLE) = REQUEST;
	MEM32(IOMMU_TABLE + 8) = len;
	MEM32(IOMMU_TABLE + 12) = 1 | 1 << 16;
	MEM32(IOMMU_TABLE + 16) = TAIL;
	MEM32(IOMMU_TABLE + 24) = tail;
	MEM32(IOMMU_TABLE + 28) = 2;
	/* The status is in the last four bytes. */
	MEM8(TAIL + tail - 4) = 0xff;
	MEM16(IOMMU_AVAILABLE + 2) = ++sent;
	__asm__ volatile("lock addl $0, (%%esp)" ::: "memory", "cc");
	MEM16(common + NOTIFY) = 0;
	while (MEM16(IOMMU_USED + 2) != sent)
		relax();
	if (MEM8(TAIL + tail - 4))
		say('!');
}

/* Maps the memory from TABLE to DATA for the disk, and adds a chunk to the disk's window. Returns the IOVA of the chunk. */
static uint32_t add_window(uint32_t slot)
{
	uint32_t common, iova;

	pci_write(slot, 4, 7);
	common = pci_read(slot, 0x10) & ~15u;
	virtio_begin(common, IOMMU_FEATURES);
	MEM16(IOMMU_AVAILABLE) = 1;
	virtio_finish(common, QUEUE_SIZE, IOMMU_TABLE, IOMMU_AVAILABLE, IOMMU_USED);
	MEM32(REQUEST + 8) = slot_of(DISK) << 3;
	request_of(common, ATTACH, 20, 4);
	MEM32(REQUEST + 8) = TABLE;
	MEM32(REQUEST + 12) = 0;
	MEM32(REQUEST + 16) = DATA - 1;
	MEM32(REQUEST + 20) = 0;
	MEM32(REQUEST + 24) = TABLE;
	MEM32(REQUEST + 28) = 0;
	MEM32(REQUEST + 32) = 3;
	request_of(common, MAP, 36, 4);
	iova = MEM32(common + CONFIG + 40);
	MEM32(REQUEST + 8) = 3;
	MEM32(REQUEST + 12) = iova;
	MEM32(REQUEST + 16) = 0;
	MEM32(REQUEST + 20) = 0;
	MEM32(REQUEST + 24) = 0;
	request_of(common, WINDOW_ADD, 28, 12);
	return iova;
}

void guest(uint32_t cpu, const uint32_t *info)
{
	static const uint32_t depths[] = { 1, 64 };
	uint32_t slot = slot_of(DISK), iommu = slot_of(IOMMU), data = DATA, common, i;

	if (iommu < 32)
		data = add_window(iommu);
	pci_write(slot, 4, 6);
	common = pci_read(slot, 0x10) & ~15u;
	virtio_begin(common, 0);
	/* VIRTQ_AVAIL_F_NO_INTERRUPT: the guest polls the used ring. */
	MEM16(AVAILABLE) = 1;
	for (i = 0; i < 64; i++) {
		uint32_t at = TABLE + 48 * i;

		MEM32(at) = HEADERS + 16 * i;
		MEM32(at + 8) = 16;
		MEM32(at + 12) = 1 | (3 * i + 1) << 16;
		MEM32(at + 16) = data + BLOCK * i % BUFFERS_LEN;
		MEM32(at + 24) = BLOCK;
		MEM32(at + 28) = 3 | (3 * i + 2) << 16;
		MEM32(at + 32) = STATUSES + i;
		MEM32(at + 40) = 1;
		MEM32(at + 44) = 2;
	}
	virtio_finish(common, QUEUE_SIZE, TABLE, AVAILABLE, USED);
	for (;;) {
		for (i = 0; i < 2; i++) {
			uint64_t begin = tsc();

			read_blocks(common + NOTIFY, depths[i]);
			say_hex(depths[i]);
			say(' ');
			say_hex((uint32_t)(tsc() - begin));
			say('\n');
		}
	}
}
