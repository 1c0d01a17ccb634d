# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Where a PVH loader enters, in flat protected mode, and where other processors begin, in real mode.
	.section .text.entry, "ax"
	.code32
	.globl entry
entry:
	cli
	# A processor in real mode that gets an NMI returns from it.
	movl	$0x10000ff0, 8
	movb	$0xcf, 0x10ff0
	xor	%eax, %eax
	jmp	1f

	# The number of this processor is that of its local APIC.
other_entry:
	mov	$16, %eax
	mov	%eax, %ds
	mov	0xfee00020, %eax
	shr	$24, %eax
	cmp	$4, %eax
	jae	3f

1:	mov	%eax, %ebp
	lgdt	gdt_pointer
	lidt	idt_pointer
	ljmp	$8, $2f
2:	mov	$16, %eax
	mov	%eax, %ds
	mov	%eax, %es
	mov	%eax, %ss
	mov	%ebp, %eax
	inc	%eax
	shl	$14, %eax
	lea	stacks(%eax), %esp
	# SSE instructions work.
	mov	%cr4, %eax
	or	$0x600, %eax
	mov	%eax, %cr4
	push	%ebp
	call	main_of_cpu
3:	hlt
	jmp	3b

	# No IRET: KVM's emulator has none for protected mode, and some hosts run such code by it. Further NMIs stay masked.
nmi:
	pushf
	lock incl nmis
	popf
	lret	$4

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
	.globl idt, nmi
	.balign	8
gdt:
	.quad	0
	.quad	0x00cf9b000000ffff
	.quad	0x00cf93000000ffff
gdt_pointer:
	.word	23
	.long	gdt
	# Vectors 0 to 2; the boot processor writes that of the NMI.
idt:
	.quad	0, 0, 0
idt_pointer:
	.word	23
	.long	idt
