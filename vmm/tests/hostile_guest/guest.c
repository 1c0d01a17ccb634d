// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * A hostile guest. The guest is 32-bit code without an operating system and without paging. Carom enters it through PVH.
 *
 * Each vCPU has a role, and all vCPUs act at the same time:
 *  0. mutated requests to the virtio-iommu, and arbitrary descriptor chains for the other devices,
 *  1. rings and descriptors that change while they are served,
 *  2. BARs, decoding and MSI-X,
 *  3. resets, bypass and ejection.
 * A life of the guest is the time from its start to the next reset. The actions of a vCPU depend on
 * the seed on the command line, the number of the current life and the vCPU's number. So a seed
 * repeats the same actions, as far as the timing of the vCPUs allows.
 *
 * A life lasts some seconds and ends with a reset by the guest itself, through ACPI's register or a
 * triple fault. If the guest did not end a life itself, the next life begins with a pause. During
 * the pause, the test checks what the VMM has kept from the previous life.
 */
#include "guest.h"

#define ACPI_RESET 0x602
#define MAX_DEVICES 12
#define MAX_QUEUES 4
/*
 * Memory of the queues. Each queue has four pages: descriptors, available ring, used ring, and
 * indirect descriptors.
 */
#define RINGS 0x1000000u
#define RING_SIZE 0x4000u
#define BUFFERS 0x2000000u
#define RAM_END 0x4000000u
/* Data that survives a reset, because Carom loads nothing at this address. */
#define KEPT ((volatile struct kept *)0x3f00000)
#define MAGIC 0x0b5e55edu
/* Addresses for 32-bit BARs. */
#define HOLE 0xe0000000u
#define HOLE_SIZE 0x18000000u
/* Bytes of address space for the first BAR of each host device. */
#define PASSED_SIZE 0x1000000u

struct kept {
	uint32_t magic, life, ended_itself;
};

struct device {
	/*
	 * `base` is the last known address of the device's registers. `notify` is the last known address of its notification port.
	 */
	uint32_t slot, type, base, notify;
	uint16_t next[MAX_QUEUES];
	uint32_t queues, size[MAX_QUEUES];
};

static struct device devices[MAX_DEVICES];
/* Slots of passed-through devices: all devices whose vendor is not virtio's (0x1af4). */
static uint32_t passed[MAX_DEVICES];
static volatile uint32_t device_count, passed_count, go;
static uint32_t state[MAX_CPUS];

static uint32_t rnd(uint32_t cpu)
{
	uint32_t x = state[cpu];

	x ^= x << 13;
	x ^= x >> 17;
	x ^= x << 5;
	return state[cpu] = x;
}

static uint32_t below(uint32_t cpu, uint32_t n) { return rnd(cpu) % n; }

static uint32_t registers(struct device *d) { return pci_read(d->slot, 0x10) & ~15u; }

static uint32_t ring(struct device *d, uint32_t q) { return RINGS + ((uint32_t)(d - devices) * MAX_QUEUES + q) * RING_SIZE; }

/* Sets up a device as a driver does, sometimes in an invalid way. */
static void start(uint32_t cpu, struct device *d)
{
	uint32_t base, q, odd = !below(cpu, 4);

	pci_write(d->slot, 4, 7);
	base = d->base = registers(d);
	if (base < HOLE || base > HOLE + HOLE_SIZE)
		return;
	MEM8(base + 20) = 0;
	MEM8(base + 20) = 1;
	MEM8(base + 20) = 3;
	for (q = 0; q < 2; q++) {
		uint32_t bits;

		MEM32(base) = q;
		bits = MEM32(base + 4);
		MEM32(base + 8) = q;
		MEM32(base + 12) = odd ? bits & rnd(cpu) : bits;
	}
	MEM8(base + 20) = 11;
	d->queues = MEM16(base + 18);
	if (d->queues > MAX_QUEUES)
		d->queues = MAX_QUEUES;
	for (q = 0; q < d->queues; q++) {
		uint32_t at = ring(d, q);

		MEM16(base + 22) = q;
		d->size[q] = MEM16(base + 24);
		if (d->size[q] > 256 || odd)
			MEM16(base + 24) = d->size[q] = 256 >> below(cpu, 8);
		MEM16(base + 26) = q;
		MEM32(base + 32) = odd && !below(cpu, 3) ? rnd(cpu) : at;
		MEM32(base + 36) = 0;
		MEM32(base + 40) = odd && !below(cpu, 3) ? rnd(cpu) : at + 0x1000;
		MEM32(base + 44) = 0;
		MEM32(base + 48) = odd && !below(cpu, 3) ? rnd(cpu) : at + 0x2000;
		MEM32(base + 52) = 0;
		MEM32(at + 0x1000) = MEM32(at + 0x2000) = 0;
		d->next[q] = 0;
		MEM16(base + 28) = 1;
	}
	MEM8(base + 20) = 15;
	d->notify = pci_read(d->slot, 0x14) & ~3u;
}

static void find(uint32_t cpu)
{
	uint32_t slot, n = 0, m = 0;

	/* Slot 0 is the host bridge. */
	for (slot = 1; slot < 32 && n < MAX_DEVICES && m < MAX_DEVICES; slot++) {
		uint32_t id = pci_read(slot, 0);

		if (id == ~0u)
			continue;
		if ((id & 0xffff) != 0x1af4) {
			passed[m] = slot;
			/* Assigns an address that 32-bit code can access. */
			pci_write(slot, 0x10, HOLE + m++ * PASSED_SIZE);
			pci_write(slot, 0x14, 0);
			pci_write(slot, 4, 7);
			continue;
		}
		devices[n].slot = slot;
		devices[n].type = (id >> 16) - 0x1040;
		n++;
	}
	device_count = n;
	passed_count = m;
	for (slot = 0; slot < n; slot++)
		start(cpu, &devices[slot]);
}

static struct device *any(uint32_t cpu) { return &devices[below(cpu, device_count ? device_count : 1)]; }

static void notify(struct device *d, uint32_t q)
{
	uint32_t port = d->notify;

	if (port >= 0x1000 && port < 0xfff0)
		outw(port + 4 * q, q);
}

/* Returns an IOVA. Most IOVAs are from a small set, so that they collide. Some IOVAs are in the aperture of windows. */
static uint32_t iova(uint32_t cpu)
{
	return (below(cpu, 8) ? 0 : 0xc0000000u) + below(cpu, 256) * 0x4000 + (below(cpu, 16) ? 0 : below(cpu, 0x100000) * 0x1000);
}

static uint32_t endpoint(uint32_t cpu)
{
	if (!below(cpu, 16))
		return rnd(cpu);
	return (passed_count && below(cpu, 2) ? passed[below(cpu, passed_count)] : any(cpu)->slot) << 3;
}

/*
 * Writes a request for the virtio-iommu to address `at`. If `first` is set, the request is an ATTACH request, otherwise its type is
 * random. Returns the request's length.
 */
static uint32_t request(uint32_t cpu, uint32_t at, uint32_t first)
{
	static const uint8_t types[] = { 1, 1, 2, 3, 3, 3, 3, 4, 4, 5, 0x40, 0x40, 0x41, 0x42, 0x42 };
	static const uint8_t lens[] = { 20, 20, 20, 36, 36, 36, 36, 28, 28, 72, 28, 28, 28, 88, 88 };
	/* Most requests need an attached endpoint, so each batch begins with ATTACH requests. */
	uint32_t kind = first ? 0 : below(cpu, sizeof(types)), len = lens[kind], i, start = iova(cpu);
	uint32_t pages = 1 + below(cpu, below(cpu, 8) ? 4 : 512);

	for (i = 0; i < 96; i += 4)
		MEM32(at + i) = 0;
	MEM8(at) = types[kind];
	MEM32(at + 4) = types[kind] == 5 ? endpoint(cpu) : below(cpu, 4) ? 1 : below(cpu, 4);
	switch (types[kind]) {
	case 1:
		MEM32(at + 8) = endpoint(cpu);
		MEM32(at + 12) = !below(cpu, 8);
		break;
	case 2:
		MEM32(at + 8) = endpoint(cpu);
		break;
	case 3:
		MEM32(at + 24) = below(cpu, RAM_END >> 12) << 12;
		MEM32(at + 32) = 1 + below(cpu, 7);
		/* fall through */
	case 4:
		MEM32(at + 8) = start;
		MEM32(at + 16) = start + pages * 0x1000 - 1;
		break;
	case 0x42:
		/* The request has room for four ranges. */
		MEM32(at + 8) = start;
		MEM32(at + 16) = 1 + below(cpu, 7);
		MEM32(at + 20) = below(cpu, 6);
		for (i = 0; i < 4; i++) {
			MEM32(at + 24 + 16 * i) = below(cpu, RAM_END >> 12) << 12;
			MEM32(at + 32 + 16 * i) = (below(cpu, 16) ? 1 + below(cpu, 4) : pages - 1) << 12;
		}
		break;
	default:
		MEM32(at + 8) = types[kind] == 0x40 ? 1 + below(cpu, 3) : 0;
		MEM32(at + 12) = 0xc0000000u + below(cpu, 16) * 0x200000;
	}
	for (i = below(cpu, 4) ? 0 : 1 + below(cpu, 4); i; i--)
		MEM8(at + below(cpu, len)) = below(cpu, 2) ? rnd(cpu) : 0xffu << below(cpu, 8);
	return below(cpu, 32) ? len : below(cpu, 96);
}

static void describe(uint32_t at, uint32_t address, uint32_t len, uint32_t flags, uint32_t next)
{
	MEM32(at) = address;
	MEM32(at + 4) = 0;
	MEM32(at + 8) = len;
	MEM16(at + 12) = flags;
	MEM16(at + 14) = next;
}

/* Makes a chain available, and notifies the device. */
static void ask(uint32_t cpu, struct device *d, uint32_t first)
{
	uint32_t q = d->type == 23 ? 0 : below(cpu, d->queues ? d->queues : 1);
	uint32_t at = ring(d, q), size = d->size[q] ? d->size[q] : 1, head, buffer, len, i, n;

	head = d->next[q] % size;
	buffer = BUFFERS + ((uint32_t)(d - devices) * 256 + head) * 0x1000;
	if (d->type == 23) {
		len = request(cpu, buffer, first);
		describe(at + head * 16, buffer, len, 1, (head + 1) % size);
		describe(at + (head + 1) % size * 16, buffer + 0x800, below(cpu, 64) ? 4 + (below(cpu, 4) ? 0 : 1024) : rnd(cpu), 2, 0);
		d->next[q] += 2;
	} else {
		n = 1 + below(cpu, 4);
		/* Type and sector of a disk request. */
		MEM32(buffer) = below(cpu, 16);
		MEM32(buffer + 8) = below(cpu, 64);
		for (i = 0; i < n; i++) {
			uint32_t address = below(cpu, 3) ? buffer + i * 512 : below(cpu, 2) ? iova(cpu) : rnd(cpu);

			len = below(cpu, 3) ? 16 * (1 + below(cpu, 64)) : rnd(cpu) >> below(cpu, 32);
			describe(at + (head + i) % size * 16, address, len, (i + 1 < n) | below(cpu, 2) << 1 | (!below(cpu, 16) << 2),
				 (head + i + 1) % size);
		}
		d->next[q] += n;
	}
	MEM16(at + 0x1004 + 2 * (MEM16(at + 0x1002) % size)) = head;
	__sync_synchronize();
	MEM16(at + 0x1002) += 1;
	__sync_synchronize();
	/* Usually, one notification covers several requests. */
	if (d->type != 23 || !below(cpu, 6))
		notify(d, q);
}

/* Role 0: requests. */
static void requests(uint32_t cpu)
{
	uint32_t i, n, base;

	for (i = 0; i < device_count; i++) {
		if (devices[i].type != 23) {
			if (!below(cpu, 8))
				ask(cpu, &devices[i], 0);
			continue;
		}
		/* A device that failed, or that another vCPU has reset, serves no requests. */
		base = devices[i].base;
		if (base >= HOLE && base < HOLE + HOLE_SIZE && MEM8(base + 20) != 15)
			start(cpu, &devices[i]);
		for (n = 0; n < 64; n++)
			ask(cpu, &devices[i], n < 4);
	}
}

/* Role 1: rings and descriptors, while they are served. */
static void rings(uint32_t cpu)
{
	struct device *d = any(cpu);
	uint32_t at = ring(d, below(cpu, MAX_QUEUES)), i;

	/* Usually skips the virtio-iommu, because most changes to its queues would make it fail immediately. */
	if (d->type == 23 && below(cpu, 16))
		return;
	for (i = 0; i < 8; i++) {
		switch (below(cpu, 8)) {
		case 0:
			MEM32(at + (below(cpu, RING_SIZE) & ~3u)) = rnd(cpu);
			break;
		case 1:
			MEM16(at + 0x1002) += below(cpu, 4) ? below(cpu, 16) : rnd(cpu);
			break;
		case 2:
			MEM16(at + 0x1004 + 2 * below(cpu, 256)) = below(cpu, 300);
			break;
		default:
			/*
			 * Flips a bit of a descriptor. This may change the address, the length, the
			 * flags or the next descriptor.
			 */
			MEM8(at + below(cpu, 4096)) ^= 1 << below(cpu, 8);
		}
	}
	notify(d, below(cpu, MAX_QUEUES));
}

/*
 * Sets up an NVMe drive as its driver does, but with queues at arbitrary IOVAs. So the drive
 * interprets arbitrary bytes as commands.
 */
static void drive(uint32_t cpu, uint32_t base)
{
	MEM32(base + 0x24) = 0x3f003f;
	MEM32(base + 0x28) = iova(cpu) & ~0xfffu;
	MEM32(base + 0x2c) = 0;
	MEM32(base + 0x30) = iova(cpu) & ~0xfffu;
	MEM32(base + 0x34) = 0;
	MEM32(base + 0x14) = 0x460001;
	wait(20);
	MEM32(base + 0x1000) = below(cpu, 64);
}

/* Role 2 for a host device: changes its addresses, capabilities and registers. Some registers make the device access memory. */
static void meddle(uint32_t cpu)
{
	uint32_t slot = passed[below(cpu, passed_count)], bar = below(cpu, 6), i;
	uint32_t base = pci_read(slot, 0x10) & ~15u, old = pci_read(slot, 0x10 + 4 * bar);

	switch (below(cpu, 16)) {
	case 0:
		pci_write(slot, 4, below(cpu, 2) ? 7 : 0);
		pci_write(slot, 0x10 + 4 * bar, HOLE + (below(cpu, HOLE_SIZE >> 15) << 15));
		pci_write(slot, 4, 7);
		break;
	case 1:
		pci_write(slot, 4, rnd(cpu) & 0x407);
		wait(12);
		pci_write(slot, 4, 7);
		break;
	case 2:
		pci_write(slot, 0x10 + 4 * bar, ~0u);
		pci_write(slot, 0x10 + 4 * bar, old);
		break;
	case 3:
		/* Writes to a capability, such as MSI-X, power management or function reset. */
		pci_write(slot, 0x40 + (below(cpu, 0xc0) & ~3u), rnd(cpu));
		break;
	case 4:
		/*
		 * Assigns the usual address of some host device to BAR 0, and turns decoding and
		 * bus mastering on.
		 */
		pci_write(slot, 0x10, HOLE + below(cpu, passed_count) * PASSED_SIZE);
		pci_write(slot, 0x14, 0);
		pci_write(slot, 4, 7);
		break;
	default:
		if (base < HOLE || base >= HOLE + HOLE_SIZE)
			break;
		if (pci_read(slot, 8) >> 8 == 0x010802 && below(cpu, 2))
			return drive(cpu, base);
		for (i = 0; i < 8; i++)
			MEM32(base + (below(cpu, 0x2000) & ~3u)) = below(cpu, 2) ? iova(cpu) : rnd(cpu);
	}
}

/* Role 2: addresses of devices, and their interrupts. */
static void places(uint32_t cpu)
{
	struct device *d = any(cpu);
	uint32_t bar = below(cpu, 6), old, base;

	if (passed_count && below(cpu, 2))
		return meddle(cpu);
	old = pci_read(d->slot, 0x10 + 4 * bar);
	switch (below(cpu, 8)) {
	case 0:
		/* Sets a random address, or the address of another device. */
		pci_write(d->slot, 4, below(cpu, 2) ? 7 : 0);
		if (bar == 1)
			pci_write(d->slot, 0x14, 0x1000 + (below(cpu, 0xe00) << 4));
		else if (bar == 3)
			pci_write(d->slot, 0x1c, below(cpu, 2) ? below(cpu, 0x100) : 0);
		else
			pci_write(d->slot, 0x10 + 4 * bar, below(cpu, 2) ? HOLE + (below(cpu, HOLE_SIZE >> 15) << 15) :
				  pci_read(any(cpu)->slot, 0x10));
		pci_write(d->slot, 4, 7);
		break;
	case 1:
		pci_write(d->slot, 4, rnd(cpu) & 0x407);
		wait(12);
		pci_write(d->slot, 4, 7);
		break;
	case 2:
		/*
		 * Writes all ones, as a driver does to read the BAR's size, and restores the BAR's
		 * value.
		 */
		pci_write(d->slot, 0x10 + 4 * bar, ~0u);
		pci_write(d->slot, 0x10 + 4 * bar, old);
		break;
	case 3:
		pci_write(d->slot, 0x40 + (below(cpu, 0xc0) & ~3u), rnd(cpu));
		break;
	default:
		base = registers(d);
		if (base < HOLE || base >= HOLE + HOLE_SIZE)
			break;
		switch (below(cpu, 4)) {
		case 0:
			MEM32(base + 0x4000 + 4 * below(cpu, 64)) = below(cpu, 2) ? 0xfee00000u | below(cpu, 4) << 12 : rnd(cpu) & 0xff;
			break;
		case 1:
			MEM16(base + 16) = below(cpu, 8);
			break;
		case 2:
			MEM32(base + 0x2000 + (below(cpu, 0x80) & ~3u)) = rnd(cpu);
			break;
		default:
			(void)MEM32(base + (below(cpu, 0x8000) & ~3u));
		}
	}
	d->base = registers(d);
	d->notify = pci_read(d->slot, 0x14) & ~3u;
}

/* Role 3: resets of devices, bypass, ejection. */
static void resets(uint32_t cpu)
{
	struct device *d = any(cpu);
	uint32_t base = d->base;

	switch (below(cpu, 64)) {
	case 0:
		if (!below(cpu, 16) && d->type != 23)
			outl(PCI_EJECT, 1u << d->slot);
		break;
	case 1 ... 8:
		if (d->type == 23 && base >= HOLE && base < HOLE + HOLE_SIZE)
			MEM8(base + 0x2000 + 36) = below(cpu, 2);
		break;
	default:
		/* Usually skips the virtio-iommu, because without this device the guest can do little. */
		if (d->type == 23 && below(cpu, 32))
			break;
		if (base >= HOLE && base < HOLE + HOLE_SIZE)
			MEM8(base + 20) = below(cpu, 4) ? 0 : rnd(cpu);
		start(cpu, d);
	}
	wait(16 + below(cpu, 6));
}

static void act(uint32_t role, uint32_t cpu)
{
	switch (role) {
	case 0:
		return requests(cpu);
	case 1:
		return rings(cpu);
	case 2:
		return places(cpu);
	default:
		return resets(cpu);
	}
}

static void die(uint32_t cpu)
{
	struct { uint16_t limit; uint32_t base; } __attribute__((packed)) none = { 0, 0 };

	KEPT->ended_itself = 1;
	say('E');
	if (below(cpu, 2))
		outb(ACPI_RESET, 1);
	__asm__ volatile("lidt %0; ud2" :: "m"(none));
	for (;;)
		;
}

/* Number of running processors, including the boot processor. */
static volatile uint32_t came = 1;

static void other(uint32_t cpu)
{
	__atomic_add_fetch(&came, 1, __ATOMIC_RELAXED);
	say('0' + cpu);
	while (!go)
		relax();
	for (;;)
		act(cpu, cpu);
}

static void bring(void)
{
	prepare_other_cpus();
	APIC[0x300 / 4] = 0xc4500;
	wait(24);
	APIC[0x300 / 4] = 0xc4600 | TRAMPOLINE >> 12;
	wait(26);
}

/* Returns the next number in a text. */
static uint32_t number(const char **text)
{
	const char *at = *text;
	uint32_t v = 0;

	while (*at && (*at < '0' || *at > '9'))
		at++;
	for (; *at >= '0' && *at <= '9'; at++)
		v = v * 10 + (*at - '0');
	*text = at;
	return v;
}

static void boot_cpu(const uint32_t *info)
{
	const char *text = (const char *)info[6];
	uint32_t cpu, first, seed = number(&text), quiet = number(&text);
	uint64_t end;

	if (KEPT->magic != MAGIC) {
		KEPT->magic = MAGIC;
		KEPT->life = 0;
		KEPT->ended_itself = 1;
	}
	KEPT->life++;
	if (!KEPT->ended_itself) {
		say('Q');
		wait(quiet);
	}
	KEPT->ended_itself = 0;
	for (cpu = 0; cpu < MAX_CPUS; cpu++) {
		state[cpu] = (seed + 1) * 2654435761u ^ KEPT->life * 40503u ^ cpu * 0x9e3779b9u;
		if (!state[cpu])
			state[cpu] = 1;
	}
	say('L');
	find(0);
	bring();
	go = 1;
	/* The life lasts two to five seconds, depending on the processor's frequency. */
	end = tsc() + ((2ull + below(0, 3)) << 31);
	while (tsc() < end) {
		act(0, 0);
		/* The boot processor also takes the roles of processors that have not started. */
		first = came;
		if (first < MAX_CPUS && !below(0, 4))
			act(first + below(0, MAX_CPUS - first), 0);
	}
	die(0);
}

void guest(uint32_t cpu, const uint32_t *info)
{
	if (cpu)
		other(cpu);
	boot_cpu(info);
}
