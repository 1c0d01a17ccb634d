// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * A guest that gives a virtio-rng device a buffer and turns the function's bus mastering off, then on again.
 *
 * It says over the serial port how far it is, and what became of the buffer. The test answers when it is to go on.
 */
#include <stdint.h>

#define SERIAL 0x3f8
#define SERIAL_STATUS 0x3fd
#define PCI_ADDRESS 0xcf8
#define PCI_DATA 0xcfc
#define DECODING 3
#define BUS_MASTER 4
#define RNG 0x10441af4u
#define TABLE 0x1000000u
#define AVAILABLE 0x1001000u
#define USED 0x1002000u
#define BUFFER 0x1003000u

#define MEM8(a) (*(volatile uint8_t *)(a))
#define MEM16(a) (*(volatile uint16_t *)(a))
#define MEM32(a) (*(volatile uint32_t *)(a))

uint8_t stack[4096] __attribute__((aligned(16)));

static inline void outb(uint16_t port, uint8_t v) { __asm__ volatile("outb %0, %1" :: "a"(v), "Nd"(port)); }
static inline void outw(uint16_t port, uint16_t v) { __asm__ volatile("outw %0, %1" :: "a"(v), "Nd"(port)); }
static inline void outl(uint16_t port, uint32_t v) { __asm__ volatile("outl %0, %1" :: "a"(v), "Nd"(port)); }
static inline uint8_t inb(uint16_t port)
{
	uint8_t v;

	__asm__ volatile("inb %1, %0" : "=a"(v) : "Nd"(port));
	return v;
}
static inline uint32_t inl(uint16_t port)
{
	uint32_t v;

	__asm__ volatile("inl %1, %0" : "=a"(v) : "Nd"(port));
	return v;
}

static uint32_t pci_read(uint32_t slot, uint32_t at)
{
	outl(PCI_ADDRESS, 0x80000000u | slot << 11 | at);
	return inl(PCI_DATA);
}

static void pci_command(uint32_t slot, uint16_t command)
{
	outl(PCI_ADDRESS, 0x80000000u | slot << 11 | 4);
	outw(PCI_DATA, command);
}

static void say(char c) { outb(SERIAL, c); }

/* Waits for an answer. */
static void hear(void)
{
	while (!(inb(SERIAL_STATUS) & 1))
		;
	inb(SERIAL);
}

static void start(uint32_t base)
{
	MEM8(base + 20) = 0;
	MEM8(base + 20) = 1;
	MEM8(base + 20) = 3;
	/* No feature but VERSION_1. */
	MEM32(base + 8) = 0;
	MEM32(base + 12) = 0;
	MEM32(base + 8) = 1;
	MEM32(base + 12) = 1;
	MEM8(base + 20) = 11;
	MEM16(base + 22) = 0;
	MEM16(base + 24) = 16;
	MEM32(base + 32) = TABLE;
	MEM32(base + 36) = 0;
	MEM32(base + 40) = AVAILABLE;
	MEM32(base + 44) = 0;
	MEM32(base + 48) = USED;
	MEM32(base + 52) = 0;
	MEM16(base + 28) = 1;
	MEM8(base + 20) = 15;
}

/* '-' if neither the buffer nor the used ring was written, '+' if both were. */
static char state(void)
{
	int used = MEM16(USED + 2) != 0, filled = MEM8(BUFFER) != 0;

	return used == filled ? used ? '+' : '-' : '?';
}

void run(void)
{
	uint32_t slot = 1;

	while (slot < 32 && pci_read(slot, 0) != RNG)
		slot++;
	pci_command(slot, DECODING | BUS_MASTER);
	start(pci_read(slot, 0x10) & ~15u);
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
