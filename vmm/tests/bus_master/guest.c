// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * A guest that gives a virtio-rng device a buffer and turns the function's bus mastering off, then on again.
 *
 * After each step it reports the state of the buffer over the serial port, and waits until the test answers.
 */
#include "guest.h"

#define DECODING 3
#define BUS_MASTER 4
#define RNG 0x10441af4u
#define TABLE 0x1000000u
#define AVAILABLE 0x1001000u
#define USED 0x1002000u
#define BUFFER 0x1003000u

static void pci_command(uint32_t slot, uint16_t command)
{
	outl(PCI_ADDRESS, 0x80000000u | slot << 11 | 4);
	outw(PCI_DATA, command);
}

/* Waits for an answer. */
static void hear(void)
{
	while (!heard())
		;
}

/* Returns '-' if the device wrote neither the buffer nor the used ring, and '+' if it wrote both. */
static char state(void)
{
	int used = MEM16(USED + 2) != 0, filled = MEM8(BUFFER) != 0;

	return used == filled ? used ? '+' : '-' : '?';
}

void guest(uint32_t cpu, const uint32_t *info)
{
	uint32_t slot = 1, common;

	while (slot < 32 && pci_read(slot, 0) != RNG)
		slot++;
	pci_command(slot, DECODING | BUS_MASTER);
	common = pci_read(slot, 0x10) & ~15u;
	virtio_begin(common, 0);
	virtio_finish(common, 16, TABLE, AVAILABLE, USED);
	MEM32(TABLE) = BUFFER;
	MEM32(TABLE + 8) = 64;
	MEM16(TABLE + 12) = 2;
	MEM16(AVAILABLE + 2) = 1;
	__sync_synchronize();
	outw(pci_read(slot, 0x14) & ~3u, 0);
	say('Q');
	hear();
	pci_command(slot, DECODING);
	say(state());
	hear();
	say(state());
	pci_command(slot, DECODING | BUS_MASTER);
	while (state() != '+')
		;
	say('+');
	for (;;)
		__asm__ volatile("hlt");
}
