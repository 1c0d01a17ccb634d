/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Instructions that do nothing, between which the emulator's plug-in
 * (tests/integration/plugin/counts.c) counts
 */
#ifndef _MARK_H
#define _MARK_H

#include <linux/compiler.h>

#define MARK_BEGIN	1
#define MARK_REPORT	2
/* The first of those that end what was begun: one for each kind of call */
#define MARK_END	16

/*
 * A no-operation whose displacement nobody would write otherwise: the number of the mark and three
 * letters. The plug-in knows it by its bytes.
 */
#define MARK	".byte 0x0f, 0x1f, 0x84, 0, %c0, 'R', 'A', 'C'\n"

static __always_inline void mark(const int number)
{
	asm volatile(MARK : : "i" (number) : "memory");
}

/* Begins, and shows where the stack is. */
static __always_inline void begin(void)
{
	asm volatile(MARK "push %%rax\n\tpop %%rax" : : "i" (MARK_BEGIN) : "memory");
}

#endif /* _MARK_H */
