# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Where a PVH loader enters, in flat protected mode.
	.section .text.entry, "ax"
	.code32
	.globl entry
entry:
	cli
	lgdt	gdt_pointer
	lidt	idt_pointer
	ljmp	$8, $1f
1:	mov	$16, %eax
	mov	%eax, %ds
	mov	%eax, %es
	mov	%eax, %ss
	mov	$stack + 16384, %esp
	call	main_of_guest
2:	hlt
	jmp	2b

	.globl interrupt
	# No IRET: KVM's emulator has none for protected mode, and some hosts run such code by it. The main loop allows interrupts again.
interrupt:
	pushf
	pusha
	call	look
	popa
	popf
	lret	$4

	.globl idt
	.balign	8
gdt:
	.quad	0
	.quad	0x00cf9b000000ffff
	.quad	0x00cf93000000ffff
gdt_pointer:
	.word	23
	.long	gdt
	# The guest writes the one vector that it uses, 0x30.
idt:
	.zero	8 * 0x31
idt_pointer:
	.word	8 * 0x31 - 1
	.long	idt
