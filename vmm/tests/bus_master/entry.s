# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Where a PVH loader enters, in flat protected mode.
	.section .text.entry, "ax"
	.code32
	.globl entry
entry:
	cli
	mov	$stack + 4096, %esp
	call	run
