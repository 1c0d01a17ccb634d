/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/* Functions for guests without an operating system: ports, memory, the serial port, PCI, virtio, interrupts and processors. */
#ifndef GUEST_H
#define GUEST_H

#include <stdint.h>

/* MAX_CPUS must have the same value as in entry.s. */
#define MAX_CPUS 4
#define SERIAL 0x3f8
#define SERIAL_STATUS 0x3fd
#define PCI_ADDRESS 0xcf8
#define PCI_DATA 0xcfc
/* Register that ejects PCI devices: a bit for each slot. */
#define PCI_EJECT 0x618
#define APIC ((volatile uint32_t *)0xfee00000)
#define TRAMPOLINE 0x10000

#define MEM8(a) (*(volatile uint8_t *)(a))
#define MEM16(a) (*(volatile uint16_t *)(a))
#define MEM32(a) (*(volatile uint32_t *)(a))

/*
 * Main function of the guest, which guest.c defines. Each processor calls it on a stack of 16 KiB. `cpu` is the ID of the processor's
 * local APIC, 0 for the boot processor. `info` is the PVH start information, or NULL on other processors.
 */
void guest(uint32_t cpu, const uint32_t *info);

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

static inline void relax(void) { __asm__ volatile("pause"); }

static inline uint64_t tsc(void)
{
	uint64_t v;

	__asm__ volatile("rdtsc" : "=A"(v));
	return v;
}

/* Waits for 2^shift cycles. */
static inline void wait(uint32_t shift)
{
	uint64_t end = tsc() + (1ull << shift);

	while (tsc() < end)
		relax();
}

static inline void lock(volatile uint32_t *l)
{
	while (__atomic_exchange_n(l, 1, __ATOMIC_ACQUIRE))
		relax();
}

static inline void unlock(volatile uint32_t *l) { __atomic_store_n(l, 0, __ATOMIC_RELEASE); }

/* Waits until the serial port accepts another byte. */
static inline void wait_for_serial(void)
{
	while (!(inb(SERIAL_STATUS) & 0x20))
		;
}

static inline void say(uint8_t c)
{
	wait_for_serial();
	outb(SERIAL, c);
}

/* Prints a number as eight hexadecimal digits. */
static inline void say_hex(uint32_t v)
{
	int shift;

	for (shift = 28; shift >= 0; shift -= 4)
		say("0123456789abcdef"[v >> shift & 15]);
}

/* Discards a byte that the test sent, and returns 1. Returns 0 if no byte has arrived. */
static inline int heard(void)
{
	if (!(inb(SERIAL_STATUS) & 1))
		return 0;
	inb(SERIAL);
	return 1;
}

/* All processors share one pair of configuration ports, so an access needs this lock. */
static volatile uint32_t pci_lock;

/* Reads configuration space of the device in `slot`. Returns the bytes from `at` to the end of the 32-bit word that contains `at`. */
static inline uint32_t pci_read(uint32_t slot, uint32_t at)
{
	uint32_t v;

	lock(&pci_lock);
	outl(PCI_ADDRESS, 0x80000000u | slot << 11 | (at & 0xfc));
	v = inl(PCI_DATA);
	unlock(&pci_lock);
	return v >> 8 * (at & 3);
}

static inline void pci_write(uint32_t slot, uint32_t at, uint32_t v)
{
	lock(&pci_lock);
	outl(PCI_ADDRESS, 0x80000000u | slot << 11 | (at & 0xfc));
	outl(PCI_DATA, v);
	unlock(&pci_lock);
}

/* Returns the slot of the first device with this vendor and device ID, or 32 if no device has this ID. */
static inline uint32_t slot_of(uint32_t id)
{
	uint32_t slot = 1;

	while (slot < 32 && pci_read(slot, 0) != id)
		slot++;
	return slot;
}

/*
 * Resets a virtio device through its common configuration. Accepts VIRTIO_F_VERSION_1, and
 * `features` as the first 32 feature bits. Accepts VIRTIO_F_ACCESS_PLATFORM if the device offers
 * this feature, as devices behind the virtio-iommu do.
 */
static inline void virtio_begin(uint32_t common, uint32_t features)
{
	MEM8(common + 20) = 0;
	while (MEM8(common + 20))
		;
	MEM8(common + 20) = 1;
	MEM8(common + 20) = 3;
	MEM32(common + 8) = 0;
	MEM32(common + 12) = features;
	MEM32(common) = 1;
	MEM32(common + 8) = 1;
	MEM32(common + 12) = 1 | (MEM32(common + 4) & 2);
	MEM8(common + 20) = 11;
}

/* Enables the first queue, with `size` descriptors, and sets DRIVER_OK. */
static inline void virtio_finish(uint32_t common, uint32_t size, uint32_t descriptors, uint32_t available, uint32_t used)
{
	MEM16(common + 22) = 0;
	MEM16(common + 24) = size;
	MEM32(common + 32) = descriptors;
	MEM32(common + 36) = 0;
	MEM32(common + 40) = available;
	MEM32(common + 44) = 0;
	MEM32(common + 48) = used;
	MEM32(common + 52) = 0;
	MEM16(common + 28) = 1;
	MEM8(common + 20) = 15;
}

extern uint8_t interrupt[];
extern volatile uint16_t idt[];
extern void (*volatile interrupt_handler)(void);

/* Sets the interrupt handler, which all vectors share, and enables it for `vector`. `vector` is at most 0x30. */
static inline void handle_interrupt(uint32_t vector, void (*handler)(void))
{
	interrupt_handler = handler;
	idt[4 * vector] = (uint32_t)interrupt;
	idt[4 * vector + 1] = 8;
	idt[4 * vector + 2] = 0x8e00;
	idt[4 * vector + 3] = (uint32_t)interrupt >> 16;
}

extern uint8_t trampoline_start[], trampoline_end[];

/* Enables this processor's local APIC, and copies the other processors' real-mode code to TRAMPOLINE. */
static inline void prepare_other_cpus(void)
{
	uint32_t i;

	for (i = 0; i < (uint32_t)(trampoline_end - trampoline_start); i++)
		MEM8(TRAMPOLINE + i) = trampoline_start[i];
	APIC[0xf0 / 4] = 0x1ff;
}

#endif
