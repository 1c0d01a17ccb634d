// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * A guest that writes to its disk for ever. The guest is 32-bit code without an operating system and without paging. Carom enters it
 * through PVH.
 *
 * The guest prints `w` on the serial port when the first write to a disk has completed. When it receives a byte on the serial port, it
 * ejects the disk and looks for the next disk.
 */
#include "guest.h"

/* Vendor and device ID of a virtio disk. */
#define DISK 0x10421af4u
#define WRITES 16
#define BYTES 4096
#define DESCRIPTORS 0x1000000u
#define AVAILABLE 0x1001000u
#define USED 0x1002000u
#define HEADERS 0x1003000u
#define STATUS 0x1004000u
#define DATA 0x1100000u
#define HOLE 0xe0000000u

/*
 * Assigns addresses to the memory BARs, each aligned to its size. Writes the addresses of all BARs to `bars`. Port BARs keep their
 * addresses.
 */
static void place_bars(uint32_t slot, uint32_t *bars)
{
	uint32_t place = HOLE, i = 0;

	while (i < 6) {
		uint32_t at = 0x10 + 4 * i, low = pci_read(slot, at), size;

		if (low & 1) {
			bars[i++] = low & ~3u;
			continue;
		}
		pci_write(slot, at, ~0u);
		size = ~(pci_read(slot, at) & ~15u) + 1;
		if (size) {
			place = (place + size - 1) & ~(size - 1);
			bars[i] = place;
			pci_write(slot, at, place);
			place += size;
		}
		if ((low & 6) == 4) {
			if (size)
				pci_write(slot, at + 4, 0);
			i++;
		}
		i++;
	}
}

static void kick(uint32_t notify)
{
	if (notify < 0x10000)
		outw(notify, 0);
	else
		MEM16(notify) = 0;
}

/* Starts the disk in this slot, and submits writes. Returns the address that notifies the disk. */
static uint32_t start(uint32_t slot)
{
	uint32_t bars[6] = { 0 }, common = 0, notify = 0, scale = 0, cap, i;

	place_bars(slot, bars);
	pci_write(slot, 4, 7);
	for (cap = pci_read(slot, 0x34) & 0xff; cap; cap = pci_read(slot, cap + 1) & 0xff) {
		uint32_t head = pci_read(slot, cap), place;

		if ((head & 0xff) != 9)
			continue;
		place = bars[(pci_read(slot, cap + 4) & 0xff) % 6] + pci_read(slot, cap + 8);
		if (head >> 24 == 1)
			common = place;
		if (head >> 24 == 2) {
			notify = place;
			scale = pci_read(slot, cap + 16);
		}
	}
	/* VIRTIO_BLK_F_FLUSH: without this feature, each write waits for the host's disk. */
	virtio_begin(common, 1u << 9);
	for (i = 0; i < 0x1000; i += 4)
		MEM32(AVAILABLE + i) = MEM32(USED + i) = 0;
	/* VIRTQ_AVAIL_F_NO_INTERRUPT: the guest polls the used ring. */
	MEM16(AVAILABLE) = 1;
	for (i = 0; i < WRITES; i++) {
		uint32_t parts[3][2] = { { HEADERS + 16 * i, 16 }, { DATA + BYTES * i, BYTES }, { STATUS + i, 1 } }, part;

		MEM32(HEADERS + 16 * i) = 1;
		MEM32(HEADERS + 16 * i + 4) = 0;
		MEM32(HEADERS + 16 * i + 8) = BYTES / 512 * i;
		MEM32(HEADERS + 16 * i + 12) = 0;
		for (part = 0; part < 3; part++) {
			uint32_t at = DESCRIPTORS + 16 * (3 * i + part);

			MEM32(at) = parts[part][0];
			MEM32(at + 4) = 0;
			MEM32(at + 8) = parts[part][1];
			MEM16(at + 12) = part < 2 ? 1 : 2;
			MEM16(at + 14) = 3 * i + part + 1;
		}
		MEM16(AVAILABLE + 4 + 2 * i) = 3 * i;
	}
	virtio_finish(common, 64, DESCRIPTORS, AVAILABLE, USED);
	notify += MEM16(common + 30) * scale;
	MEM16(AVAILABLE + 2) = WRITES;
	kick(notify);
	return notify;
}

static void work(uint32_t slot)
{
	uint32_t notify = start(slot);
	uint16_t used = 0, available = WRITES;

	for (;;) {
		if (MEM16(USED + 2) != used) {
			uint32_t head = MEM32(USED + 4 + 8 * (used % 64));

			if (!used++ && available == WRITES)
				say('w');
			MEM16(AVAILABLE + 4 + 2 * (available % 64)) = head;
			__asm__ volatile("mfence" ::: "memory");
			MEM16(AVAILABLE + 2) = ++available;
			kick(notify);
		}
		if (heard()) {
			outl(PCI_EJECT, 1u << slot);
			return;
		}
	}
}

void guest(uint32_t cpu, const uint32_t *info)
{
	for (;;) {
		uint32_t slot;

		for (slot = 0; slot < 32; slot++)
			if (pci_read(slot, 0) == DISK)
				work(slot);
	}
}
