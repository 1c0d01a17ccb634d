/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/*
 * A kernel that reads the serial port's line status three times by one string instruction, prints the three bytes and powers off.
 * Its entry point is that of a PVH kernel (Xen's docs/misc/pvh.pandoc): 32-bit protected mode, flat segments, no paging.
 */
#define DATA_PORT	0x3f8
#define LINE_STATUS	0x3fd
/* ACPI's sleep control register: sleep type 5, enabled (ACPI 6.5, section 4.8.3.7). */
#define SLEEP_CONTROL	0x600
#define POWER_OFF	0x34

	.section .note.Xen, "a", @note
	.align	4
	.long	4, 8, 18	/* XEN_ELFNOTE_PHYS32_ENTRY */
	.asciz	"Xen"
	.quad	_start

	.text
	.code32
	.globl	_start
_start:
	cld
	mov	$LINE_STATUS, %edx
	mov	$bytes, %edi
	mov	$3, %ecx
	rep insb
	mov	$DATA_PORT, %edx
	mov	$bytes, %esi
	mov	$4, %ecx
1:	lodsb
	outb	%al, %dx
	loop	1b
	mov	$SLEEP_CONTROL, %edx
	mov	$POWER_OFF, %al
	outb	%al, %dx
2:	hlt
	jmp	2b

	.data
bytes:	.ascii	"---\n"

	.section .note.GNU-stack, "", @progbits
