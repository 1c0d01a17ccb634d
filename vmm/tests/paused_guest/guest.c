// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * A guest that checks each byte that it reads from devices, while the VM is paused repeatedly. The guest is 32-bit code without
 * an operating system and without paging. Carom enters it through PVH.
 *
 * The guest uses instructions whose accesses KVM completes in pieces: moves of 16 bytes, strings, read-modify-write, and port
 * strings. Each of the other processors tests one MSI-X table. The boot processor tests all other regions that it finds, starts
 * processors that are added, and ejects processors that it is asked to release.
 *
 * After each round, one instruction prints a line of 16 bytes with the number of the round. A line that begins with '!' reports a
 * wrong word, and the guest stops comparing.
 */
#include "guest.h"

#define SCRATCH 0x3ff
#define CPUS_PRESENT 0x620
#define CPUS_CAME 0x640
#define CPUS_TO_GO 0x660
#define CPU_EJECT 0x680
#define ECAM 0xf8000000u
#define MAX_REGIONS 64
#define MAX_WORDS 16
/* Address for BARs that 32-bit code could not access otherwise. */
#define HOLE 0xf0000000u
#define HOLE_SIZE 0x1000000u
#define VIRTIO 0x1af4
/* Vendor and device ID of the device that the vfio-user server serves. */
#define SERVED 0x11e81234

enum kind {
	/* The contents never change. */
	CONSTANT,
	/* Each word keeps the value last written. */
	MEMORY,
	/* An MSI-X table: like memory, but the last word of each entry has only the mask bit, which stays set. */
	TABLE,
	/* BARs in the ECAM of a function whose decoding is off. Some bits of each word do not change. */
	BARS,
};

struct region {
	uint32_t base, words, cpu;
	enum kind kind;
	/*
	 * For a region of kind CONSTANT, `is` has the words. For BARs, `changes` has the bits that change, and `set` has the bits
	 * that are always set.
	 */
	uint32_t is[MAX_WORDS], changes[MAX_WORDS], set[MAX_WORDS];
};

static struct region regions[MAX_REGIONS];
static volatile uint32_t region_count, wrong, print_lock;
static uint32_t tables;

/* String instructions. The addresses are of memory or of device registers. */
static inline void move_words(uint32_t to, uint32_t from, uint32_t n)
{
	__asm__ volatile("rep movsl" : "+D"(to), "+S"(from), "+c"(n) :: "memory");
}
static inline void fill_words(uint32_t to, uint32_t v, uint32_t n)
{
	__asm__ volatile("rep stosl" : "+D"(to), "+c"(n) : "a"(v) : "memory");
}
static inline void out_bytes(uint16_t port, const void *from, uint32_t n)
{
	__asm__ volatile("rep outsb" : "+S"(from), "+c"(n) : "d"(port) : "memory");
}
static inline void out_words(uint16_t port, const void *from, uint32_t n)
{
	__asm__ volatile("rep outsl" : "+S"(from), "+c"(n) : "d"(port) : "memory");
}
static inline void in_bytes(uint16_t port, void *to, uint32_t n)
{
	__asm__ volatile("rep insb" : "+D"(to), "+c"(n) : "d"(port) : "memory");
}
static inline void in_words(uint16_t port, void *to, uint32_t n)
{
	__asm__ volatile("rep insl" : "+D"(to), "+c"(n) : "d"(port) : "memory");
}
/* Moves 16 bytes with one instruction. The compiler does not use XMM0. */
static inline void move_16(uint32_t to, uint32_t from)
{
	__asm__ volatile("movups (%1), %%xmm0\n\tmovups %%xmm0, (%0)" :: "r"(to), "r"(from) : "memory");
}
static void move_by_16(uint32_t to, uint32_t from, uint32_t words)
{
	for (; words >= 4; words -= 4, to += 16, from += 16)
		move_16(to, from);
	move_words(to, from, words);
}

static void print(const char *text, uint32_t n)
{
	wait_for_serial();
	out_bytes(SERIAL, text, n);
}

static void hex(char *at, uint32_t v)
{
	uint32_t i;

	for (i = 0; i < 8; i++)
		at[i] = "0123456789abcdef"[v >> (28 - 4 * i) & 15];
}

/* Prints the first wrong word. */
static void tell(uint32_t cpu, uint32_t at, uint32_t is, uint32_t should)
{
	static char line[] = "\n!cpu 00000000 at 00000000: 00000000 is not 00000000\n";

	if (__atomic_exchange_n(&wrong, 1, __ATOMIC_ACQUIRE))
		return;
	hex(line + 6, cpu);
	hex(line + 18, at);
	hex(line + 28, is);
	hex(line + 44, should);
	lock(&print_lock);
	print(line, sizeof(line) - 1);
	unlock(&print_lock);
}

static void compare(uint32_t cpu, uint32_t base, const uint32_t *is, const uint32_t *should, uint32_t words)
{
	uint32_t i;

	for (i = 0; i < words; i++)
		if (is[i] != should[i])
			tell(cpu, base + 4 * i, is[i], should[i]);
}

/* Reads all words in several ways, one after the other. */
static void read_all(uint32_t cpu, struct region *r, const uint32_t *should)
{
	uint32_t buffer[MAX_WORDS], i;

	fill_words((uint32_t)buffer, 0xa5a5a5a5, MAX_WORDS);
	move_words((uint32_t)buffer, r->base, r->words);
	compare(cpu, r->base, buffer, should, r->words);
	fill_words((uint32_t)buffer, 0xa5a5a5a5, MAX_WORDS);
	move_by_16((uint32_t)buffer, r->base, r->words);
	compare(cpu, r->base, buffer, should, r->words);
	for (i = 0; i < r->words; i++)
		buffer[i] = MEM32(r->base + 4 * i);
	compare(cpu, r->base, buffer, should, r->words);
}

/* Returns the content of word `i` of a region after `v` was written to it. */
static uint32_t kept(const struct region *r, uint32_t i, uint32_t v)
{
	if (r->kind == BARS)
		return (v & r->changes[i]) | r->set[i];
	return r->kind == TABLE && i % 4 == 3 ? v & 1 : v;
}

/* Writes all words in several ways, one after the other, and reads them. */
static void write_all(uint32_t cpu, struct region *r, uint32_t round)
{
	uint32_t out[MAX_WORDS], should[MAX_WORDS], i, way;

	for (way = 0; way < 3; way++) {
		for (i = 0; i < r->words; i++) {
			uint32_t v = (round * 3 + way) * 0x9e3779b9u ^ (i + 1) * 0x01234567u ^ r->base;

			out[i] = way == 2 ? 0x51515151 : r->kind == TABLE && i % 4 == 3 ? v | 1 : v;
			should[i] = kept(r, i, out[i]);
		}
		switch (way) {
		case 0:
			move_words(r->base, (uint32_t)out, r->words);
			break;
		case 1:
			move_by_16(r->base, (uint32_t)out, r->words);
			break;
		default:
			fill_words(r->base, 0x51515151, r->words);
		}
		read_all(cpu, r, should);
	}
	if (r->kind == BARS)
		return;
	/* Tests instructions that read and write the same word. */
	__asm__ volatile("addl %1, (%0)" :: "r"(r->base), "r"(round) : "memory");
	should[0] += round;
	__asm__ volatile("lock xorl %1, (%0)" :: "r"(r->base + 8), "r"(round) : "memory");
	should[2] ^= round;
	read_all(cpu, r, should);
	/* Copies from registers to registers: the first half gets the values of the second half. */
	i = r->words / 2;
	move_words(r->base, r->base + 4 * i, i);
	while (i--)
		should[i] = kept(r, i, should[i + r->words / 2]);
	read_all(cpu, r, should);
}

static void ports(uint32_t cpu, uint32_t round)
{
	static uint32_t first_id;
	uint32_t buffer[MAX_WORDS], should[MAX_WORDS], i;
	uint8_t bytes[16], v = round * 7;

	for (i = 0; i < 16; i++)
		bytes[i] = v + i + 1;
	out_bytes(SCRATCH, bytes, 16);
	fill_words((uint32_t)buffer, 0, 4);
	in_bytes(SCRATCH, buffer, 16);
	fill_words((uint32_t)should, bytes[15] * 0x01010101u, 4);
	compare(cpu, SCRATCH, buffer, should, 4);
	for (i = 0; i < MAX_WORDS; i++)
		should[i] = 0x80000000u | (i + 1 == MAX_WORDS ? 0 : i << 11);
	out_words(PCI_ADDRESS, should, MAX_WORDS);
	if (inl(PCI_ADDRESS) != 0x80000000u)
		tell(cpu, PCI_ADDRESS, inl(PCI_ADDRESS), 0x80000000u);
	if (!first_id)
		first_id = inl(PCI_DATA);
	in_words(PCI_DATA, buffer, MAX_WORDS);
	fill_words((uint32_t)should, first_id, MAX_WORDS);
	compare(cpu, PCI_DATA, buffer, should, MAX_WORDS);
}

static struct region *add(enum kind kind, uint32_t base, uint32_t words)
{
	struct region *r = &regions[region_count];
	uint32_t i;

	if (region_count == MAX_REGIONS)
		return r;
	r->kind = kind;
	r->base = base;
	r->words = words < MAX_WORDS ? words : MAX_WORDS;
	r->cpu = 0;
	for (i = 0; i < r->words; i++)
		r->is[i] = MEM32(base + 4 * i);
	region_count++;
	return r;
}

/* Adds the MSI-X tables of the device, unless they are in port BARs. */
static void find_table(uint32_t slot)
{
	uint32_t at = pci_read(slot, 0x34) & 0xfc, id, place, bar, words;
	struct region *r;

	for (; at; at = id >> 8 & 0xfc) {
		id = pci_read(slot, at);
		if ((id & 0xff) != 0x11)
			continue;
		place = pci_read(slot, at + 4);
		bar = 0x10 + 4 * (place & 7);
		words = 4 * (((id >> 16) & 0x7ff) + 1);
		if (pci_read(slot, bar) & 1)
			return;
		r = add(TABLE, (pci_read(slot, bar) & ~15u) + (place & ~7u), words);
		/* Each of the other processors gets one table. */
		if (++tables < MAX_CPUS)
			r->cpu = tables;
	}
}

/* Adds the BARs of a function. They may have any value, because the function's decoding is off. */
static void use_bars(uint32_t slot)
{
	uint32_t at = ECAM + (slot << 15) + 0x10, i, ones;
	struct region *r;

	pci_write(slot, 4, 0);
	r = add(BARS, at, 4);
	for (i = 0; i < r->words; i++) {
		MEM32(at + 4 * i) = 0;
		r->set[i] = MEM32(at + 4 * i);
		MEM32(at + 4 * i) = ~0u;
		ones = MEM32(at + 4 * i);
		r->changes[i] = ones & ~r->set[i];
	}
}

static void find(void)
{
	uint32_t slot, id, base;

	/* The host bridge becomes the first region. */
	for (slot = 0; slot < 32; slot++) {
		id = pci_read(slot, 0);
		if (id == ~0u)
			continue;
		if (slot && (id & 0xffff) == VIRTIO) {
			pci_write(slot, 4, 2);
			base = (pci_read(slot, 0x10) & ~15u) + 0x2000;
			switch ((id >> 16) - 0x1040) {
			case 2:
				/* A disk: its size and limits. */
				add(CONSTANT, base, 9);
				break;
			case 4:
				/* A source of random numbers. The guest uses only the header of its configuration space. */
				use_bars(slot);
				continue;
			case 19:
				/* The vsock device: its CID. */
				add(CONSTANT, base, 2);
			}
			find_table(slot);
		} else if (slot) {
			base = HOLE + slot * (HOLE_SIZE / 32);
			pci_write(slot, 0x10, base);
			pci_write(slot, 0x14, 0);
			pci_write(slot, 4, 2);
			if (id == SERVED)
				add(MEMORY, base, MAX_WORDS);
			find_table(slot);
		}
		add(CONSTANT, ECAM + (slot << 15), MAX_WORDS);
	}
}

static void start_cpus(uint32_t cpus)
{
	uint32_t cpu, i;

	for (cpu = 1; cpu < MAX_CPUS; cpu++) {
		if (!(cpus & 1u << cpu))
			continue;
		for (i = 0; i < 2; i++) {
			APIC[0x310 / 4] = cpu << 24;
			APIC[0x300 / 4] = i ? 0x4600 | TRAMPOLINE >> 12 : 0x4500;
		}
	}
}

static void use_regions(uint32_t cpu, uint32_t round)
{
	uint32_t i;

	for (i = 0; i < region_count; i++) {
		if (regions[i].cpu != cpu)
			continue;
		if (regions[i].kind == CONSTANT)
			read_all(cpu, &regions[i], regions[i].is);
		else
			write_all(cpu, &regions[i], round);
	}
	/* Every processor reads the host bridge. */
	if (cpu)
		read_all(cpu, &regions[0], regions[0].is);
}

/* Does nothing, because the test needs NMIs only to interrupt accesses. */
static void ignore_nmi(void) { }

/* Other processors start in real mode. There the handler of NMIs, vector 2, is an IRET. */
static void ignore_nmis_in_real_mode(void)
{
	__asm__ volatile("movl $0x10000ff0, 8\n\tmovb $0xcf, 0x10ff0" ::: "memory");
}

/* CR4.OSFXSR and CR4.OSXMMEXCPT enable SSE instructions. */
static void enable_sse(void)
{
	uint32_t v;

	__asm__ volatile("mov %%cr4, %0\n\tor $0x600, %0\n\tmov %0, %%cr4" : "=r"(v));
}

void guest(uint32_t cpu, const uint32_t *info)
{
	static char line[] = "round 00000000.\n";
	uint32_t round, gone, i;

	enable_sse();
	if (!cpu) {
		ignore_nmis_in_real_mode();
		handle_interrupt(2, ignore_nmi);
		find();
		prepare_other_cpus();
		/*
		 * Clear the bits of processors that were added so far, because CPUS_PRESENT
		 * includes these processors.
		 */
		inl(CPUS_CAME);
		start_cpus(inl(CPUS_PRESENT));
	}
	for (round = 1; !wrong; round++) {
		use_regions(cpu, round);
		if (cpu)
			continue;
		ports(cpu, round);
		start_cpus(inl(CPUS_CAME));
		gone = inl(CPUS_TO_GO);
		for (i = 1; i < MAX_CPUS; i++)
			if (gone & 1u << i)
				outl(CPU_EJECT, i);
		hex(line + 6, round);
		lock(&print_lock);
		print(line, sizeof(line) - 1);
		unlock(&print_lock);
	}
	for (;;)
		__asm__ volatile("hlt");
}
