// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * A guest that reads 4 KiB blocks of a virtio disk, again and again, and prints how long that takes: one request at a time, then 64 at
 * a time. It polls for completions, so that no interrupt takes time. A line is the depth and the time stamp counter's cycles for
 * READS requests, both in hexadecimal.
 */
#include "guest.h"

/* A disk by vendor and device. */
#define DISK 0x10421af4u
#define QUEUE_SIZE 256
#define READS 8192
#define BLOCK 4096
/* Blocks of the disk that are read. */
#define BLOCKS 8192
#define TABLE 0x1000000u
#define AVAILABLE 0x1001000u
#define USED 0x1002000u
#define HEADERS 0x1003000u
#define STATUSES 0x1004000u
#define DATA 0x1100000u
/* Offset of the notification register in the BAR. */
#define NOTIFY 0x3000
/* The device asks for no notifications. */
#define NO_NOTIFY 1

static uint16_t available, used;
static uint32_t block;

static void submit(uint32_t request)
{
	/* Blocks one after the other would be one request of the host's. */
	block = (block + 4097) % BLOCKS;
	MEM32(HEADERS + 16 * request + 8) = block * (BLOCK / 512);
	MEM16(AVAILABLE + 4 + 2 * (available++ % QUEUE_SIZE)) = 3 * request;
}

/* Shows the device what was submitted. */
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

static void say_hex(uint32_t v)
{
	int shift;

	for (shift = 28; shift >= 0; shift -= 4)
		say("0123456789abcdef"[v >> shift & 15]);
}

void guest(uint32_t cpu, const uint32_t *info)
{
	static const uint32_t depths[] = { 1, 64 };
	uint32_t slot = 1, common, i;

	while (slot < 32 && pci_read(slot, 0) != DISK)
		slot++;
	pci_write(slot, 4, 6);
	common = pci_read(slot, 0x10) & ~15u;
	virtio_begin(common, 0);
	/* No interrupts. */
	MEM16(AVAILABLE) = 1;
	for (i = 0; i < 64; i++) {
		uint32_t at = TABLE + 48 * i;

		MEM32(at) = HEADERS + 16 * i;
		MEM32(at + 8) = 16;
		MEM32(at + 12) = 1 | (3 * i + 1) << 16;
		MEM32(at + 16) = DATA + BLOCK * i;
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
