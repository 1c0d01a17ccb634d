/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The allocator of bounce slots; see the comment at the top of dma-bounce-slots.c.
 *
 * It needs little of the kernel, and is built in user space too, to be tested under load: what it
 * needs comes from a header that the build there includes first.
 */
#ifndef _DMA_BOUNCE_SLOTS_H
#define _DMA_BOUNCE_SLOTS_H

#ifdef __KERNEL__
#include <linux/bit_spinlock.h>
#include <linux/bits.h>
#include <linux/build_bug.h>
#include <linux/cache.h>
#include <linux/list.h>
#include <linux/lockdep.h>
#include <linux/mutex.h>
#include <linux/percpu.h>
#include <linux/rcupdate.h>
#include <linux/sizes.h>
#include <linux/spinlock.h>
#include <linux/types.h>
#endif

struct request;
struct scatterlist;

/* Slots are 4 KiB to 256 KiB: 128 KiB that start in the middle of a page need the largest. */
#define DMA_BOUNCE_MIN_SHIFT	12
#define DMA_BOUNCE_CLASSES	7
#define DMA_BOUNCE_MAX_SHIFT	(DMA_BOUNCE_MIN_SHIFT + DMA_BOUNCE_CLASSES - 1)
#define DMA_BOUNCE_MAX_SLOT	BIT(DMA_BOUNCE_MAX_SHIFT)

/* Most slots of one kind and class that a CPU keeps to itself */
#define DMA_BOUNCE_CACHE_SLOTS	32
/* ... and most bytes; less where many CPUs share little memory */
#define DMA_BOUNCE_CACHE_BYTES	SZ_1M
/* In the address of a slot that a CPU keeps: it was not touched since caches were flushed last. */
#define DMA_BOUNCE_UNTOUCHED	1UL
/* How many CPUs are asked for a slot where the depot has none */
#define DMA_BOUNCE_STEAL_CPUS	16
/* What part of all slots are few */
#define DMA_BOUNCE_LOW_PART	8
/* How long an owner that was asked for a chunk, and added none, is not asked again */
#define DMA_BOUNCE_ASK_AGAIN	(HZ / 4)

/* What the device may do with a slot, as with mainline's mappings of the three directions. */
enum dma_bounce_kind {
	DMA_BOUNCE_READ,
	DMA_BOUNCE_WRITE,
	DMA_BOUNCE_RW,
	DMA_BOUNCE_KINDS,
};

enum dma_bounce_chunk_state {
	DMA_BOUNCE_LIVE,
	DMA_BOUNCE_WHOLE,	/* it has no slots: it is used as a whole */
	DMA_BOUNCE_DRAINING,	/* its slots are not handed out any more */
	DMA_BOUNCE_DEAD,	/* ... and its memory is gone: what is mapped by it is orphaned */
};

enum dma_bounce_mapped {
	DMA_BOUNCE_SINGLE,
	DMA_BOUNCE_ENTRY,	/* a list that has one entry */
	DMA_BOUNCE_LIST,
	DMA_BOUNCE_REQUEST,
	DMA_BOUNCE_MAPPED_TYPES,
};

/**
 * struct dma_bounce_slot - one bounce buffer, and what is mapped by it
 * @chunk:	where it is
 * @phys:	what a single mapping bounces, or that of a list of one entry
 * @sgl:	what a longer list's mapping bounces
 * @req:	whose data the mapping of a block request bounces
 * @nents:	entries of the list
 * @mapped:	&enum dma_bounce_mapped
 * @offset:	where in the slot the mapped bytes start
 * @len:	mapped bytes; 0 if the slot is free
 * @no_copy_in:	holds older data where the device does not write
 */
struct dma_bounce_slot {
	struct dma_bounce_chunk	*chunk;
	union {
		phys_addr_t		phys;
		struct scatterlist	*sgl;
		struct request		*req;
	};
	unsigned int		nents;
	unsigned int		offset;
	unsigned int		len;
	u8			mapped;
	bool			no_copy_in;
};

/**
 * struct dma_bounce_chunk - a piece of memory, cut into slots of one size
 * @va:		where the CPU sees it; not to be used once it is dead
 * @iova:	where devices see it
 * @size:	bytes
 * @nslots:	number of slots
 * @kind:	&enum dma_bounce_kind
 * @class:	log2 of the slot size, less DMA_BOUNCE_MIN_SHIFT
 * @state:	&enum dma_bounce_chunk_state; the depot's lock protects this and what follows
 * @node:	in the depot's list, if any slot is in the depot and @state is live
 * @nfree:	how many of the slots are in the depot
 * @idle_since:	when @nfree became @nslots, in jiffies
 * @free:	stack of the numbers of slots in the depot
 * @rcu:	frees this structure
 * @slots:	the slots, none of which is in two cache lines
 *
 * What each mapping reads has a cache line of its own, which is seldom written.
 */
struct dma_bounce_chunk {
	void			*va;
	dma_addr_t		iova;
	size_t			size;
	unsigned int		nslots;
	u8			kind;
	u8			class;
	u8			state;

	struct list_head	node ____cacheline_aligned_in_smp;
	unsigned int		nfree;
	unsigned long		idle_since;
	u32			*free;
	struct rcu_head		rcu;

	struct dma_bounce_slot	slots[] __counted_by(nslots) ____cacheline_aligned_in_smp;
};

struct dma_bounce_depot {
	raw_spinlock_t		lock;	/* protects this and the free slots of its chunks */
	struct list_head	chunks;	/* those with a slot in the depot */
	unsigned int		nslots;
	unsigned int		nfree;
	bool			asks;		/* for a chunk more */
	unsigned long		ask_at;		/* when to ask again, in jiffies */
	unsigned long		needed_at;	/* when it last could not do with one less */
} ____cacheline_aligned_in_smp;

/**
 * struct dma_bounce_cpu - the slots that a CPU keeps, and what it counts
 * @lock:	bit 0 locks all but @bytes; nests outside the depots' locks. A spinlock of a guest
 *		is unlocked by another locked operation, or by a call.
 * @n:		slots by kind and class
 * @served:	slots that were taken from here, by what for. It would cost each mapping another
 *		entry of the TLB elsewhere.
 * @bytes:	bytes copied from slots, and to slots
 * @slots:	the slots; those that are there since caches were flushed last have
 *		DMA_BOUNCE_UNTOUCHED set in their address
 *
 * A mapping that is not copied writes the first cache line, and reads a slot's address.
 */
struct dma_bounce_cpu {
	unsigned long		lock;
	u8			n[DMA_BOUNCE_KINDS][DMA_BOUNCE_CLASSES];
	u64			served[DMA_BOUNCE_MAPPED_TYPES];

	u64			bytes[2] ____cacheline_aligned_in_smp;
	unsigned long		slots[DMA_BOUNCE_KINDS][DMA_BOUNCE_CLASSES]
				     [DMA_BOUNCE_CACHE_SLOTS] ____cacheline_aligned_in_smp;
};

static_assert(offsetof(struct dma_bounce_cpu, bytes) <= 64);

/**
 * struct dma_bounce_slots - an allocator
 * @base:	first IOVA of its range; valid once @len is not 0
 * @len:	bytes of IOVA, 0 as long as there is nothing to allocate
 * @cpus:	per-CPU caches of slots
 * @chunks:	by (IOVA - @base) >> @chunk_shift
 * @depots:	free slots
 * @chunk_shift: log2 of the distance of chunks
 * @cap:	how many slots of a class a CPU keeps; 0 for none
 * @notify:	called when the last slot of a chunk that is not live any more comes back, by
 *		whoever gives it back, with locks held; and when a depot asks for a chunk
 * @mutex:	serialises changes of the set of chunks: to be held by whoever calls a function
 *		that adds, takes away or looks at chunks
 */
struct dma_bounce_slots {
	dma_addr_t			base;
	u64				len;
	struct dma_bounce_cpu __percpu	*cpus;
	struct dma_bounce_chunk __rcu	**chunks;
	struct dma_bounce_depot		(*depots)[DMA_BOUNCE_CLASSES];
	u8				chunk_shift;
	u8				cap[DMA_BOUNCE_CLASSES];
	void				(*notify)(struct dma_bounce_slots *slots);
	struct mutex			mutex;	/* serialises changes of the set of chunks */
};

static inline size_t dma_bounce_class_size(unsigned int class)
{
	return 1UL << (class + DMA_BOUNCE_MIN_SHIFT);
}

/* How many slots of a class a chunk has, unless the provider gives less than was asked for */
static inline unsigned int dma_bounce_per_chunk(struct dma_bounce_slots *slots, unsigned int class)
{
	return 1U << (slots->chunk_shift - class - DMA_BOUNCE_MIN_SHIFT);
}

static inline void *dma_bounce_slot_va(struct dma_bounce_slot *slot)
{
	struct dma_bounce_chunk *chunk = slot->chunk;

	return chunk->va + ((slot - chunk->slots) << (chunk->class + DMA_BOUNCE_MIN_SHIFT));
}

static inline dma_addr_t dma_bounce_slot_iova(struct dma_bounce_slot *slot)
{
	struct dma_bounce_chunk *chunk = slot->chunk;

	return chunk->iova + ((dma_addr_t)(slot - chunk->slots) <<
			      (chunk->class + DMA_BOUNCE_MIN_SHIFT));
}

static inline size_t dma_bounce_slot_size(struct dma_bounce_slot *slot)
{
	return dma_bounce_class_size(slot->chunk->class);
}

/* Whether @addr is in the range. Whoever got such an address saw the allocator become ready. */
static inline bool dma_bounce_slots_own(struct dma_bounce_slots *slots, dma_addr_t addr)
{
	u64 len = smp_load_acquire(&slots->len);	/* pairs with dma_bounce_slots_open() */

	return addr - slots->base < len;
}

/* Number of places for chunks */
static inline unsigned long dma_bounce_slots_places(struct dma_bounce_slots *slots)
{
	return slots->len >> slots->chunk_shift;
}

/* The chunk at a place, or NULL */
static inline struct dma_bounce_chunk *dma_bounce_slots_chunk(struct dma_bounce_slots *slots,
							      unsigned long place)
{
	return rcu_dereference_protected(slots->chunks[place], lockdep_is_held(&slots->mutex));
}

void dma_bounce_slots_init(struct dma_bounce_slots *slots,
			   void (*notify)(struct dma_bounce_slots *slots));
int dma_bounce_slots_open(struct dma_bounce_slots *slots, dma_addr_t base, u64 len,
			  unsigned int chunk_shift);
void dma_bounce_slots_close(struct dma_bounce_slots *slots);
void dma_bounce_slots_limit(struct dma_bounce_slots *slots, u64 bytes);

struct dma_bounce_slot *__dma_bounce_slots_get(struct dma_bounce_slots *slots,
					       enum dma_bounce_kind kind, unsigned int class,
					       enum dma_bounce_mapped mapped);
void __dma_bounce_slots_put(struct dma_bounce_slots *slots, struct dma_bounce_cpu *cpu,
			    struct dma_bounce_slot *slot);
void dma_bounce_slots_flush(struct dma_bounce_slots *slots, bool all);

struct dma_bounce_chunk *dma_bounce_chunk_alloc(enum dma_bounce_kind kind, unsigned int class,
						size_t size, int node);
void dma_bounce_chunk_discard(struct dma_bounce_chunk *chunk);
void dma_bounce_chunk_publish(struct dma_bounce_slots *slots, struct dma_bounce_chunk *chunk,
			      void *va, dma_addr_t iova, size_t size);
void dma_bounce_chunk_publish_whole(struct dma_bounce_slots *slots, struct dma_bounce_chunk *chunk,
				    void *va, dma_addr_t iova, size_t size);
bool dma_bounce_chunk_withdraw(struct dma_bounce_slots *slots, struct dma_bounce_chunk *chunk,
			       unsigned long age, bool spare);
void dma_bounce_chunk_retire(struct dma_bounce_slots *slots, struct dma_bounce_chunk *chunk,
			     enum dma_bounce_chunk_state state);
unsigned int dma_bounce_chunk_used(struct dma_bounce_slots *slots, struct dma_bounce_chunk *chunk);
void dma_bounce_chunk_remove(struct dma_bounce_slots *slots, struct dma_bounce_chunk *chunk);

/* Interrupts are off. */
static __always_inline void dma_bounce_cpu_lock(struct dma_bounce_cpu *cpu)
{
	bit_spin_lock(0, &cpu->lock);
}

static __always_inline void dma_bounce_cpu_unlock(struct dma_bounce_cpu *cpu)
{
	__bit_spin_unlock(0, &cpu->lock);
}

/* The slot of an entry of what a CPU keeps */
static __always_inline struct dma_bounce_slot *dma_bounce_kept_slot(unsigned long entry)
{
	return (struct dma_bounce_slot *)(entry & ~DMA_BOUNCE_UNTOUCHED);
}

/* Takes the slot that the CPU got back last, or returns NULL. Runs under the lock of @cpu. */
static __always_inline struct dma_bounce_slot *
dma_bounce_cache_pop(struct dma_bounce_cpu *cpu, enum dma_bounce_kind kind, unsigned int class,
		     enum dma_bounce_mapped mapped)
{
	unsigned int n = cpu->n[kind][class];
	struct dma_bounce_slot *slot;

	if (!n)
		return NULL;
	slot = dma_bounce_kept_slot(cpu->slots[kind][class][--n]);
	/* The cache is about to be flushed: devices do not reach the memory any more. */
	if (unlikely(READ_ONCE(slot->chunk->state) == DMA_BOUNCE_DEAD))
		return NULL;
	WRITE_ONCE(cpu->n[kind][class], n);
	WRITE_ONCE(cpu->served[mapped], cpu->served[mapped] + 1);
	slot->mapped = mapped;
	return slot;
}

/**
 * dma_bounce_slots_get - take a free slot
 * @slots: an allocator that is open
 * @kind: what the device may do with it
 * @class: log2 of its size, less DMA_BOUNCE_MIN_SHIFT
 * @mapped: what for
 *
 * The caller is in an RCU read-side critical section until it is done with the slot's memory. Each
 * mapping runs through this: what the CPU keeps is taken without a call.
 *
 * Return: a slot that has @mapped set, or NULL if there is none now.
 */
static __always_inline struct dma_bounce_slot *
dma_bounce_slots_get(struct dma_bounce_slots *slots, enum dma_bounce_kind kind, unsigned int class,
		     enum dma_bounce_mapped mapped)
{
	struct dma_bounce_slot *slot;
	struct dma_bounce_cpu *cpu;
	unsigned long flags;

	local_irq_save(flags);
	cpu = raw_cpu_ptr(slots->cpus);
	dma_bounce_cpu_lock(cpu);
	slot = dma_bounce_cache_pop(cpu, kind, class, mapped);
	dma_bounce_cpu_unlock(cpu);
	local_irq_restore(flags);
	return likely(slot) ? slot : __dma_bounce_slots_get(slots, kind, class, mapped);
}

/**
 * dma_bounce_slots_put - give a slot back
 * @slots: its allocator
 * @slot: a slot from dma_bounce_slots_get()
 *
 * The slot's chunk may have been retired meanwhile.
 */
static __always_inline void dma_bounce_slots_put(struct dma_bounce_slots *slots,
						 struct dma_bounce_slot *slot)
{
	struct dma_bounce_chunk *chunk = slot->chunk;
	unsigned int kind = chunk->kind, class = chunk->class, n;
	struct dma_bounce_cpu *cpu;
	unsigned long flags;

	WRITE_ONCE(slot->len, 0);
	local_irq_save(flags);
	cpu = raw_cpu_ptr(slots->cpus);
	dma_bounce_cpu_lock(cpu);
	n = cpu->n[kind][class];
	if (likely(n < READ_ONCE(slots->cap[class]) &&
		   READ_ONCE(chunk->state) == DMA_BOUNCE_LIVE)) {
		cpu->slots[kind][class][n] = (unsigned long)slot;
		WRITE_ONCE(cpu->n[kind][class], n + 1);
	} else {
		__dma_bounce_slots_put(slots, cpu, slot);
	}
	dma_bounce_cpu_unlock(cpu);
	local_irq_restore(flags);
}

/**
 * dma_bounce_slots_find - find the slot that an address belongs to
 * @slots: the allocator
 * @addr: an address for which dma_bounce_slots_own() is true
 *
 * The caller is in an RCU read-side critical section.
 *
 * Return: the slot, or NULL if there is none or nothing is mapped by it.
 */
static __always_inline struct dma_bounce_slot *
dma_bounce_slots_find(struct dma_bounce_slots *slots, dma_addr_t addr)
{
	struct dma_bounce_chunk *chunk;
	unsigned long number;

	chunk = rcu_dereference(slots->chunks[(addr - slots->base) >> slots->chunk_shift]);
	if (!chunk)
		return NULL;
	number = (addr - chunk->iova) >> (chunk->class + DMA_BOUNCE_MIN_SHIFT);
	if (number >= chunk->nslots || !READ_ONCE(chunk->slots[number].len))
		return NULL;
	return &chunk->slots[number];
}

/* Whether an address for which dma_bounce_slots_own() is true is of a chunk without slots */
static inline bool dma_bounce_slots_whole(struct dma_bounce_slots *slots, dma_addr_t addr)
{
	struct dma_bounce_chunk *chunk;

	chunk = rcu_dereference(slots->chunks[(addr - slots->base) >> slots->chunk_shift]);
	return chunk && READ_ONCE(chunk->state) == DMA_BOUNCE_WHOLE;
}

/**
 * dma_bounce_slots_cached - count the slots that CPUs keep
 * @slots: an allocator that is open
 * @kind: of this kind
 * @class: and this size
 *
 * Return: their number, which may be outdated already.
 */
static inline unsigned int dma_bounce_slots_cached(struct dma_bounce_slots *slots,
						   enum dma_bounce_kind kind, unsigned int class)
{
	unsigned int n = 0, i;

	for_each_possible_cpu(i)
		n += READ_ONCE(per_cpu_ptr(slots->cpus, i)->n[kind][class]);
	return n;
}

/**
 * dma_bounce_slots_served - count the slots that were ever taken
 * @slots: an allocator that is open
 * @mapped: for this
 *
 * Return: their number, which may be outdated already.
 */
static inline u64 dma_bounce_slots_served(struct dma_bounce_slots *slots,
					  enum dma_bounce_mapped mapped)
{
	unsigned int i;
	u64 n = 0;

	for_each_possible_cpu(i)
		n += READ_ONCE(per_cpu_ptr(slots->cpus, i)->served[mapped]);
	return n;
}

/**
 * dma_bounce_slots_bytes - count the bytes that were ever copied
 * @slots: an allocator that is open
 * @to_slot: to slots; otherwise from them
 *
 * Return: their number, which may be outdated already.
 */
static inline u64 dma_bounce_slots_bytes(struct dma_bounce_slots *slots, bool to_slot)
{
	unsigned int i;
	u64 n = 0;

	for_each_possible_cpu(i)
		n += READ_ONCE(per_cpu_ptr(slots->cpus, i)->bytes[to_slot]);
	return n;
}

#endif /* _DMA_BOUNCE_SLOTS_H */
