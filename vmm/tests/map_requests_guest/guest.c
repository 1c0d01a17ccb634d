// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * A guest that maps pages by the virtio-iommu for a disk behind it and unmaps them, again and again, and prints how long that takes: one
 * page at a time, then 64 at a time. It polls for answers, so that no interrupt takes time. A line is the number of pages and the time
 * stamp counter's cycles for PAIRS pairs of MAP and UNMAP, both in hexadecimal.
 */
#include "guest.h"

/* A disk and the virtio-iommu by vendor and device. */
#define DISK 0x10421af4u
#define IOMMU 0x10571af4u
/* VIRTIO_IOMMU_F_MAP_UNMAP */
#define MAP_UNMAP 4
#define ATTACH 1
#define MAP 3
#define UNMAP 4
#define PAIRS 8192
#define MOST 64
#define TABLE 0x1000000u
#define AVAILABLE 0x1001000u
#define USED 0x1002000u
/* Requests of 64 bytes each, and their tails. */
#define REQUESTS 0x1010000u
#define TAILS 0x1020000u
#define PAGE 0x1100000u
/* The device asks for no notifications. */
#define NO_NOTIFY 1

static uint32_t notify, size;
static uint16_t available, used;

/* Puts request `n` of `len` bytes into the queue. */
static void submit(uint32_t n, uint32_t type, uint32_t len)
{
	MEM32(REQUESTS + 64 * n) = type;
	MEM32(REQUESTS + 64 * n + 4) = 1;
	MEM32(TABLE + 32 * n + 8) = len;
	MEM8(TAILS + 4 * n) = 0xff;
	MEM16(AVAILABLE + 4 + 2 * (available++ % size)) = 2 * n;
}

/* Shows the device what was submitted, and waits for the answers. */
static void serve(uint32_t count)
{
	uint32_t n;

	__asm__ volatile("" ::: "memory");
	MEM16(AVAILABLE + 2) = available;
	__asm__ volatile("lock addl $0, (%%esp)" ::: "memory", "cc");
	if (!(MEM16(USED) & NO_NOTIFY))
		outw(notify, 0);
	used += count;
	while (MEM16(USED + 2) != used)
		relax();
	for (n = 0; n < count; n++)
		if (MEM8(TAILS + 4 * n))
			say('!');
}

static void map_and_unmap(uint32_t pages)
{
	static uint32_t place;
	uint32_t done, n;

	for (done = 0; done < PAIRS; done += pages) {
		for (n = 0; n < pages; n++) {
			uint32_t at = REQUESTS + 64 * n, page = (place + n * 7) % 1024;

			/* Above 4 GiB. */
			MEM32(at + 8) = page << 12;
			MEM32(at + 12) = 1;
			MEM32(at + 16) = (page << 12) + 0xfff;
			MEM32(at + 20) = 1;
			MEM32(at + 24) = PAGE;
			MEM32(at + 28) = 0;
			MEM32(at + 32) = 3;
			submit(n, MAP, 36);
		}
		serve(pages);
		for (n = 0; n < pages; n++) {
			MEM32(REQUESTS + 64 * n + 24) = 0;
			submit(n, UNMAP, 28);
		}
		serve(pages);
		place += 389;
	}
}

static void say_hex(uint32_t v)
{
	int shift;

	for (shift = 28; shift >= 0; shift -= 4)
		say("0123456789abcdef"[v >> shift & 15]);
}

static uint32_t slot_of(uint32_t id)
{
	uint32_t slot = 1;

	while (slot < 32 && pci_read(slot, 0) != id)
		slot++;
	return slot;
}

void guest(uint32_t cpu, const uint32_t *info)
{
	static const uint32_t counts[] = { 1, MOST };
	uint32_t slot = slot_of(IOMMU), common, i;

	pci_write(slot, 4, 7);
	common = pci_read(slot, 0x10) & ~15u;
	notify = pci_read(slot, 0x14) & ~3u;
	virtio_begin(common, MAP_UNMAP);
	/* No interrupts. */
	MEM16(AVAILABLE) = 1;
	for (i = 0; i < MOST; i++) {
		MEM32(TABLE + 32 * i) = REQUESTS + 64 * i;
		MEM32(TABLE + 32 * i + 12) = 1 | (2 * i + 1) << 16;
		MEM32(TABLE + 32 * i + 16) = TAILS + 4 * i;
		MEM32(TABLE + 32 * i + 24) = 4;
		MEM32(TABLE + 32 * i + 28) = 2;
	}
	MEM16(common + 22) = 0;
	size = MEM16(common + 24);
	if (size > 256)
		size = 256;
	virtio_finish(common, size, TABLE, AVAILABLE, USED);
	MEM32(REQUESTS + 8) = slot_of(DISK) << 3;
	submit(0, ATTACH, 20);
	serve(1);
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
