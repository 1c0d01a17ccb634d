# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# A PVH loader starts the boot processor at `entry` in flat protected mode. The trampoline starts the other processors at `other_entry`.
# Each processor calls guest().
	.set	MAX_CPUS, 4
	.set	STACK_SHIFT, 14

	.section .text.entry, "ax"
	.code32
	.globl entry
entry:
	cli
	mov	%ebx, %esi
	xor	%ebp, %ebp
	jmp	1f

	# The number of this processor is the ID of its local APIC.
other_entry:
	mov	$16, %eax
	mov	%eax, %ds
	xor	%esi, %esi
	mov	0xfee00020, %ebp
	shr	$24, %ebp
	cmp	$MAX_CPUS, %ebp
	jae	3f

1:	lgdt	gdt_pointer
	lidt	idt_pointer
	ljmp	$8, $2f
2:	mov	$16, %eax
	mov	%eax, %ds
	mov	%eax, %es
	mov	%eax, %ss
	mov	%ebp, %eax
	inc	%eax
	shl	$STACK_SHIFT, %eax
	lea	stacks(%eax), %esp
	push	%esi
	push	%ebp
	call	guest
3:	hlt
	jmp	3b

	# The handler uses no IRET, because some hosts emulate this code, and KVM's emulator does not support IRET in protected mode.
	# Interrupts and NMIs therefore stay masked.
	.globl interrupt
interrupt:
	pushf
	pusha
	call	*interrupt_handler
	popa
	popf
	lret	$4

	# Other processors begin here in real mode. prepare_other_cpus() copies this code to TRAMPOLINE.
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
	.globl idt, interrupt_handler
	.balign	8
gdt:
	.quad	0
	.quad	0x00cf9b000000ffff
	.quad	0x00cf93000000ffff
gdt_pointer:
	.word	23
	.long	gdt
	.balign	8
	# Vectors 0 to 0x30. handle_interrupt() writes their entries.
idt:
	.zero	8 * 0x31
idt_pointer:
	.word	8 * 0x31 - 1
	.long	idt
interrupt_handler:
	.long	0

	.bss
	.balign	16
stacks:
	.zero	MAX_CPUS << STACK_SHIFT
