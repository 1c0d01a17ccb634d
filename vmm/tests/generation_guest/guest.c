// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * A guest that keeps printing its VM Generation ID and the number of notifications about a new ID. The guest is 32-bit code without
 * an operating system and without paging. Carom enters it through PVH. The constants GENERATION_ID and NOTICE are the addresses
 * that Carom writes to the ACPI tables.
 */
#include "guest.h"

#define GENERATION_ID ((const volatile uint8_t *)0xf1000)
#define NOTICE 0x60c
#define LINE 19
#define VECTOR 0x30
#define IO_APIC ((volatile uint32_t *)0xfec00000)

static volatile uint32_t notices;

static void look(void)
{
	if (inb(NOTICE))
		notices++;
	APIC[0xb0 / 4] = 0;
}

static void say_byte(uint8_t v)
{
	say("0123456789abcdef"[v >> 4]);
	say("0123456789abcdef"[v & 15]);
}

void guest(uint32_t cpu, const uint32_t *info)
{
	uint32_t i, count;
	uint8_t id[16];

	handle_interrupt(VECTOR, look);
	APIC[0xf0 / 4] = 0x1ff;
	IO_APIC[0] = 0x11 + 2 * LINE;
	IO_APIC[4] = 0;
	/* The interrupt line is level-triggered and active high. */
	IO_APIC[0] = 0x10 + 2 * LINE;
	IO_APIC[4] = VECTOR | 1 << 15;
	for (;;) {
		__asm__ volatile("cli");
		for (i = 0; i < sizeof(id); i++)
			id[i] = GENERATION_ID[i];
		count = notices;
		/*
		 * Unmask interrupts in each round, because `interrupt` in entry.s returns with
		 * interrupts masked.
		 */
		__asm__ volatile("sti");
		for (i = 0; i < sizeof(id); i++)
			say_byte(id[i]);
		say(' ');
		say_byte(count);
		say('\n');
		wait(23);
	}
}
