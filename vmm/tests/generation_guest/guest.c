// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * A guest that prints its VM Generation ID, and how often it was notified of another one, again and again: no operating system, no
 * paging, 32-bit code behind a PVH entry. It finds both where the ACPI tables say they are.
 */
#include <stdint.h>

#define SERIAL 0x3f8
#define GENERATION_ID ((const volatile uint8_t *)0xf1000)
#define NOTICE 0x60c
#define LINE 19
#define VECTOR 0x30
#define APIC ((volatile uint32_t *)0xfee00000)
#define IO_APIC ((volatile uint32_t *)0xfec00000)

static volatile uint32_t notices;
uint8_t stack[16384] __attribute__((aligned(16)));
extern volatile uint16_t idt[];
extern uint8_t interrupt[];

static inline void outb(uint16_t port, uint8_t v) { __asm__ volatile("outb %0, %1" :: "a"(v), "Nd"(port)); }
static inline uint8_t inb(uint16_t port)
{
	uint8_t v;

	__asm__ volatile("inb %1, %0" : "=a"(v) : "Nd"(port));
	return v;
}
static inline uint64_t tsc(void)
{
	uint64_t v;

	__asm__ volatile("rdtsc" : "=A"(v));
	return v;
}

void look(void)
{
	if (inb(NOTICE))
		notices++;
	APIC[0xb0 / 4] = 0;
}

static void say(uint8_t c)
{
	while (!(inb(SERIAL + 5) & 0x20))
		;
	outb(SERIAL, c);
}

static void say_hex(uint8_t v)
{
	say("0123456789abcdef"[v >> 4]);
	say("0123456789abcdef"[v & 15]);
}

void main_of_guest(void)
{
	uint32_t i, count;
	uint8_t id[16];
	uint64_t end;

	idt[4 * VECTOR] = (uint32_t)interrupt;
	idt[4 * VECTOR + 1] = 8;
	idt[4 * VECTOR + 2] = 0x8e00;
	idt[4 * VECTOR + 3] = (uint32_t)interrupt >> 16;
	APIC[0xf0 / 4] = 0x1ff;
	IO_APIC[0] = 0x11 + 2 * LINE;
	IO_APIC[4] = 0;
	/* Level-triggered, active high. */
	IO_APIC[0] = 0x10 + 2 * LINE;
	IO_APIC[4] = VECTOR | 1 << 15;
	for (;;) {
		__asm__ volatile("cli");
		for (i = 0; i < sizeof(id); i++)
			id[i] = GENERATION_ID[i];
		count = notices;
		__asm__ volatile("sti");
		for (i = 0; i < sizeof(id); i++)
			say_hex(id[i]);
		say(' ');
		say_hex(count);
		say('\n');
		for (end = tsc() + (1 << 23); tsc() < end;)
			__asm__ volatile("pause");
	}
}
