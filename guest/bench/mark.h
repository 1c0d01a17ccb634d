/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Marks in the code of a benchmark. A mark is a no-operation. The emulator's plug-in
 * (tests/integration/plugin/counts.c) counts between two marks.
 */
#ifndef _MARK_H
#define _MARK_H

#include <linux/compiler.h>

#define MARK_BEGIN	1
#define MARK_REPORT	2
/* First of the numbers that end a count, one for each kind of call */
#define MARK_END	16

/*
 * A no-operation with a displacement that no other code has: the number of the mark and three
 * letters. The plug-in recognises the mark by its bytes.
 */
#define MARK	".byte 0x0f, 0x1f, 0x84, 0, %c0, 'R', 'A', 'C'\n"

static __always_inline void mark(const int number)
{
	asm volatile(MARK : : "i" (number) : "memory");
}

/* Begins a count. The first access is to the stack, so that the plug-in learns its address. */
static __always_inline void begin(void)
{
	asm volatile(MARK "push %%rax\n\tpop %%rax" : : "i" (MARK_BEGIN) : "memory");
}

#endif /* _MARK_H */
