# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# A PVH loader enters here, in flat protected mode.
	.section .text.entry, "ax"
	.code32
	.globl entry
entry:
	cli
	lgdt	gdt_pointer
	ljmp	$8, $1f
1:	mov	$16, %eax
	mov	%eax, %ds
	mov	%eax, %es
	mov	%eax, %ss
	mov	$stack + 16384, %esp
	call	guest
2:	hlt
	jmp	2b

	.balign	8
gdt:
	.quad	0
	.quad	0x00cf9b000000ffff
	.quad	0x00cf93000000ffff
gdt_pointer:
	.word	23
	.long	gdt
