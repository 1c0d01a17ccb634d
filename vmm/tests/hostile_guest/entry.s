# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Where a PVH loader enters, in flat protected mode, and where other processors begin, in real mode.
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
	mov	$stacks + 16384, %esp
	push	%ebx
	call	main_of_boot_cpu
2:	hlt
	jmp	2b

	# The number of this processor is the order in which it came.
other_entry:
	mov	$16, %eax
	mov	%eax, %ds
	mov	%eax, %es
	mov	%eax, %ss
	mov	$1, %eax
	lock xadd %eax, next_cpu
	cmp	$4, %eax
	jae	2b
	mov	%eax, %ecx
	inc	%ecx
	shl	$14, %ecx
	lea	stacks(%ecx), %esp
	push	%eax
	call	other

	.globl trampoline_start, trampoline_end
	.code16
trampoline_start:
	cli
	mov	%cs, %ax
	mov	%ax, %ds
	lgdtl	trampoline_gdt - trampoline_start
	mov	%cr0, %eax
	or	$1, %eax
	mov	%eax, %cr0
	ljmpl	$8, $other_entry
trampoline_gdt:
	.word	23
	.long	gdt
trampoline_end:

	.code32
	.balign	8
gdt:
	.quad	0
	.quad	0x00cf9b000000ffff
	.quad	0x00cf93000000ffff
gdt_pointer:
	.word	23
	.long	gdt
