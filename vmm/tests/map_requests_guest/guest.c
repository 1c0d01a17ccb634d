// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * A guest that sends MAP and UNMAP requests for a disk behind the virtio-iommu and prints the
 * duration. The guest maps one page at a time, then 64 pages at a time. The guest polls for
 * answers, so that interrupts take no time. Each line has two hexadecimal numbers. The first number
 * is the number of pages that are mapped at a time. The second number is the duration of PAIRS
 * pairs of MAP and UNMAP in cycles of the time stamp counter.
 */
#include "guest.h"

/* Vendor and device IDs of a disk and of the virtio-iommu. */
#define DISK 0x10421af4u
#define IOMMU 0x10571af4u
/* VIRTIO_IOMMU_F_MAP_UNMAP */
#define MAP_UNMAP 4
#define ATTACH 1
#define MAP 3
#define UNMAP 4
#define QUEUE_SIZE 256
#define PAIRS 2048
/* Number of requests of each kind. The descriptors of all requests fill the table. */
#define MOST 64
#define TABLE 0x1000000u
#define AVAILABLE 0x1001000u
#define USED 0x1002000u
/* Requests, of 64 bytes each, and their tails. */
#define REQUESTS 0x1010000u
#define TAILS 0x1020000u
#define PAGE 0x1100000u
/* Flag that the device sets while it needs no notifications. */
#define NO_NOTIFY 1

static uint32_t notify;
static uint16_t available, used;

/* Adds the request that begins with this descriptor to the queue. */
static void submit(uint32_t head)
{
	MEM16(AVAILABLE + 4 + 2 * (available++ % QUEUE_SIZE)) = head;
}

/* Makes the submitted requests visible to the device, and waits for the answers. */
static void serve(uint16_t count)
{
	__asm__ volatile("" ::: "memory");
	MEM16(AVAILABLE + 2) = available;
	__asm__ volatile("lock addl $0, (%%esp)" ::: "memory", "cc");
	if (!(MEM16(USED) & NO_NOTIFY))
		outw(notify, 0);
	used += count;
	while (MEM16(USED + 2) != used)
		relax();
}

/* Builds request `n` with its descriptors. */
static uint32_t build(uint32_t n, uint32_t type, uint32_t len)
{
	uint32_t at = REQUESTS + 64 * n, descriptor = TABLE + 32 * n;

	MEM32(at) = type;
	MEM32(at + 4) = 1;
	MEM32(descriptor) = at;
	MEM32(descriptor + 8) = len;
	MEM32(descriptor + 12) = 1 | (2 * n + 1) << 16;
	MEM32(descriptor + 16) = TAILS + 4 * n;
	MEM32(descriptor + 24) = 4;
	MEM32(descriptor + 28) = 2;
	MEM8(TAILS + 4 * n) = 0xff;
	return at;
}

/* Builds all requests. Requests 0 to MOST - 1 map a page each. The other requests unmap these pages. */
static void build_all(void)
{
	uint32_t n;

	for (n = 0; n < 2 * MOST; n++) {
		uint32_t page = n % MOST * 7, at = n < MOST ? build(n, MAP, 36) : build(n, UNMAP, 28);

		/* The IOVA is above 4 GiB. */
		MEM32(at + 8) = page << 12;
		MEM32(at + 12) = 1;
		MEM32(at + 16) = (page << 12) + 0xfff;
		MEM32(at + 20) = 1;
		if (n < MOST) {
			MEM32(at + 24) = PAGE;
			MEM32(at + 32) = 3;
		}
	}
}

static void check(void)
{
	uint32_t n;

	for (n = 0; n < 2 * MOST; n++)
		if (MEM8(TAILS + 4 * n))
			say('!');
}

/*
 * If KVM emulates the guest's instructions, the guest needs longer to build requests than the device needs to serve them. So the guest
 * sends the same requests repeatedly. If it submits MOST requests at a time, it also reuses the entries of the available ring.
 */
static void map_and_unmap(uint32_t pages)
{
	uint32_t done, n;

	if (pages == 1) {
		for (done = 0; done < PAIRS; done++) {
			submit(2 * (done % MOST));
			serve(1);
			submit(2 * (done % MOST + MOST));
			serve(1);
		}
	} else {
		/*
		 * Fill all entries of the ring once. All submissions below use these entries again.
		 */
		for (n = 0; n < QUEUE_SIZE; n++)
			submit(2 * (n % (2 * MOST)));
		for (available -= QUEUE_SIZE, done = 0; done < 2 * PAIRS; done += MOST) {
			available += MOST;
			serve(MOST);
		}
	}
	check();
}

void guest(uint32_t cpu, const uint32_t *info)
{
	static const uint32_t counts[] = { 1, MOST };
	uint32_t slot = slot_of(IOMMU), common, i;

	pci_write(slot, 4, 7);
	common = pci_read(slot, 0x10) & ~15u;
	notify = pci_read(slot, 0x14) & ~3u;
	virtio_begin(common, MAP_UNMAP);
	/* VIRTQ_AVAIL_F_NO_INTERRUPT: the guest polls the used ring. */
	MEM16(AVAILABLE) = 1;
	virtio_finish(common, QUEUE_SIZE, TABLE, AVAILABLE, USED);
	MEM32(build(0, ATTACH, 20) + 8) = slot_of(DISK) << 3;
	submit(0);
	serve(1);
	build_all();
	for (;;) {
		for (i = 0; i < 2; i++) {
			uint64_t begin = tsc();

			map_and_unmap(counts[i]);
			say_hex(counts[i]);
			say(' ');
			say_hex((uint32_t)(tsc() - begin));
			say('\n');
		}
	}
}
