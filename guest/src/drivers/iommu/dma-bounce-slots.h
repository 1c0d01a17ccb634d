/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Allocator of bounce slots. See the comment at the top of dma-bounce-slots.c.
 *
 * The allocator uses few kernel functions, so that it can also be built and tested under load in
 * user space. The build for user space includes a header that provides these functions.
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

/* Slots are 4 KiB to 256 KiB. A buffer of 128 KiB that starts inside a page needs 256 KiB. */
#define DMA_BOUNCE_MIN_SHIFT	12
#define DMA_BOUNCE_CLASSES	7
#define DMA_BOUNCE_MAX_SHIFT	(DMA_BOUNCE_MIN_SHIFT + DMA_BOUNCE_CLASSES - 1)
#define DMA_BOUNCE_MAX_SLOT	BIT(DMA_BOUNCE_MAX_SHIFT)

/* Maximum number of free slots of one kind and class that a CPU keeps */
#define DMA_BOUNCE_CACHE_SLOTS	32
/* Maximum number of bytes of these slots. The limit is lower if many CPUs share little memory. */
#define DMA_BOUNCE_CACHE_BYTES	SZ_1M
/* Flag in the address of a slot that a CPU keeps: not touched since the last flush of caches */
#define DMA_BOUNCE_UNTOUCHED	1UL
/* Maximum number of CPUs that are searched for a slot if the depot is empty */
#define DMA_BOUNCE_STEAL_CPUS	16
/* A depot is low if at most one in DMA_BOUNCE_LOW_PART of its slots is free. */
#define DMA_BOUNCE_LOW_PART	8
/* Minimum time in jiffies between two requests for a chunk, if no chunk was added meanwhile */
#define DMA_BOUNCE_ASK_AGAIN	(HZ / 4)

/* Access of the device to a slot, one kind for each direction of a mapping */
enum dma_bounce_kind {
	DMA_BOUNCE_READ,
	DMA_BOUNCE_WRITE,
	DMA_BOUNCE_RW,
	DMA_BOUNCE_KINDS,
};

enum dma_bounce_chunk_state {
	DMA_BOUNCE_LIVE,
	DMA_BOUNCE_WHOLE,	/* has no slots, is used as a whole */
	DMA_BOUNCE_BLOCKED,	/* has no slots, is not used: something holds its pages */
	DMA_BOUNCE_DRAINING,	/* slots are no longer handed out */
	DMA_BOUNCE_DEAD,	/* ... and the memory is lost: mapped slots are orphaned */
};

enum dma_bounce_mapped {
	DMA_BOUNCE_SINGLE,
	DMA_BOUNCE_ENTRY,	/* a list with one entry */
	DMA_BOUNCE_LIST,
	DMA_BOUNCE_REQUEST,
	DMA_BOUNCE_MAPPED_TYPES,
};

/**
 * struct dma_bounce_slot - one bounce buffer, and the mapping that it serves
 * @chunk:	chunk of the slot
 * @phys:	bounced buffer of a single mapping, or of a list with one entry
 * @sgl:	bounced list with several entries
 * @req:	block request whose data is bounced
 * @nents:	number of entries of the list, 0 for a single mapping
 * @mapped:	&enum dma_bounce_mapped
 * @offset:	offset of the mapped bytes in the slot
 * @len:	number of mapped bytes, 0 if the slot is free
 * @no_copy_in:	the buffer was not copied to the slot. Bytes that the device does not write are
 *		older data.
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
 * @va:		CPU address, which must not be used once the chunk is dead
 * @iova:	address for devices
 * @size:	length in bytes
 * @nslots:	number of slots
 * @kind:	&enum dma_bounce_kind
 * @class:	log2 of the slot size, minus DMA_BOUNCE_MIN_SHIFT
 * @state:	&enum dma_bounce_chunk_state. The depot's lock protects @state and the members
 *		after it.
 * @node:	entry in the depot's list, if any slot is in the depot and @state is live
 * @nfree:	number of the chunk's slots that are in the depot
 * @idle_since:	time at which @nfree became @nslots, in jiffies
 * @free:	stack of the numbers of slots in the depot
 * @rcu:	frees this structure
 * @slots:	the slots. No slot spans two cache lines.
 *
 * The members that each mapping reads have a separate cache line, which is rarely written.
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
	raw_spinlock_t		lock;	/* protects the depot and the free slots of its chunks */
	struct list_head	chunks;	/* chunks with a slot in the depot */
	unsigned int		nslots;
	unsigned int		nfree;
	bool			asks;		/* the depot asks for another chunk */
	unsigned long		ask_at;		/* earliest time of the next request, in jiffies */
	unsigned long		needed_at;	/* last time that the depot needed all its chunks */
} ____cacheline_aligned_in_smp;

/**
 * struct dma_bounce_cpu - free slots that a CPU keeps, and counters of the CPU
 * @lock:	bit 0 locks all members except @bytes. It nests outside the depots' locks. A bit
 *		lock is used because in a guest, unlocking a spinlock takes a second locked
 *		operation, or a call.
 * @n:		number of slots by kind and class
 * @served:	number of slots that were taken from this cache, by type of mapping. The counters
 *		are here because elsewhere they would cost each mapping another TLB entry.
 * @bytes:	bytes that were copied from slots (0) and to slots (1)
 * @slots:	addresses of the slots. DMA_BOUNCE_UNTOUCHED is set in the addresses of slots that
 *		have stayed here since the last flush of caches.
 *
 * A mapping without a copy writes the first cache line, and reads the address of a slot.
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
 * struct dma_bounce_slots - an allocator of slots
 * @base:	first IOVA of the allocator's range, valid once @len is not 0
 * @len:	length of the range in bytes, 0 until the allocator is open
 * @cpus:	per-CPU caches of slots
 * @chunks:	table of chunks, indexed by (IOVA - @base) >> @chunk_shift
 * @depots:	free slots by kind and class
 * @chunk_shift: log2 of the distance of chunks
 * @cap:	maximum number of slots of a class that a CPU keeps, which may be 0
 * @notify:	called when the last slot of a chunk that is no longer live returns, and when a
 *		depot asks for a chunk. In the first case, the CPU that returns the slot holds
 *		locks.
 * @mutex:	serialises changes of the set of chunks. Callers of functions that add, remove or
 *		look at chunks hold it.
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
	struct mutex			mutex;	/* serialises changes of the chunks */
};

static inline size_t dma_bounce_class_size(unsigned int class)
{
	return 1UL << (class + DMA_BOUNCE_MIN_SHIFT);
}

/* Returns the number of slots in a chunk of full size. The provider may give smaller chunks. */
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

/* Returns true if @addr is in the range. This is always so for a slot's address. */
static inline bool dma_bounce_slots_own(struct dma_bounce_slots *slots, dma_addr_t addr)
{
	u64 len = smp_load_acquire(&slots->len);	/* pairs with dma_bounce_slots_open() */

	return addr - slots->base < len;
}

/* Returns the number of places for chunks. */
static inline unsigned long dma_bounce_slots_places(struct dma_bounce_slots *slots)
{
	return slots->len >> slots->chunk_shift;
}

/* Returns the chunk at a place, or NULL. */
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
				    void *va, dma_addr_t iova, size_t size,
				    enum dma_bounce_chunk_state state);
bool dma_bounce_chunk_withdraw(struct dma_bounce_slots *slots, struct dma_bounce_chunk *chunk,
			       unsigned long age, bool spare);
void dma_bounce_chunk_retire(struct dma_bounce_slots *slots, struct dma_bounce_chunk *chunk,
			     enum dma_bounce_chunk_state state);
unsigned int dma_bounce_chunk_used(struct dma_bounce_slots *slots, struct dma_bounce_chunk *chunk);
void dma_bounce_chunk_remove(struct dma_bounce_slots *slots, struct dma_bounce_chunk *chunk);

/* Tells lockdep of the CPUs' bit locks, which it does not see. */
#ifdef CONFIG_DEBUG_LOCK_ALLOC
extern struct lockdep_map dma_bounce_cpu_map;
#define dma_bounce_cpu_acquire()	lock_map_acquire(&dma_bounce_cpu_map)
#define dma_bounce_cpu_release()	lock_map_release(&dma_bounce_cpu_map)
#else
#define dma_bounce_cpu_acquire()	do { } while (0)
#define dma_bounce_cpu_release()	do { } while (0)
#endif

/* Must be called with interrupts off. */
static __always_inline void dma_bounce_cpu_lock(struct dma_bounce_cpu *cpu)
{
	dma_bounce_cpu_acquire();
	bit_spin_lock(0, &cpu->lock);
}

static __always_inline void dma_bounce_cpu_unlock(struct dma_bounce_cpu *cpu)
{
	__bit_spin_unlock(0, &cpu->lock);
	dma_bounce_cpu_release();
}

/* Returns the slot of an entry in a CPU's cache. */
static __always_inline struct dma_bounce_slot *dma_bounce_kept_slot(unsigned long entry)
{
	return (struct dma_bounce_slot *)(entry & ~DMA_BOUNCE_UNTOUCHED);
}

/* Takes the slot that was last returned to @cpu, or returns NULL. Needs the lock of @cpu. */
static __always_inline struct dma_bounce_slot *
dma_bounce_cache_pop(struct dma_bounce_cpu *cpu, enum dma_bounce_kind kind, unsigned int class,
		     enum dma_bounce_mapped mapped)
{
	unsigned int n = cpu->n[kind][class];
	struct dma_bounce_slot *slot;

	if (!n)
		return NULL;
	slot = dma_bounce_kept_slot(cpu->slots[kind][class][--n]);
	/* Devices no longer reach the memory of the slot. The cache is about to be flushed. */
	if (unlikely(READ_ONCE(slot->chunk->state) == DMA_BOUNCE_DEAD))
		return NULL;
	WRITE_ONCE(cpu->n[kind][class], n);
	WRITE_ONCE(cpu->served[mapped], cpu->served[mapped] + 1);
	slot->mapped = mapped;
	return slot;
}

/**
 * dma_bounce_slots_get - take a free slot
 * @slots: an open allocator
 * @kind: access that the device needs
 * @class: log2 of the slot's size, minus DMA_BOUNCE_MIN_SHIFT
 * @mapped: type of mapping that the slot is for
 *
 * The caller is in an RCU read-side critical section until it no longer uses the slot's memory.
 * Each mapping runs through this function, so it takes a slot of the CPU's cache without a call.
 *
 * Return: a slot with its member mapped set, or NULL if no slot is free.
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
 * dma_bounce_slots_put - return a slot
 * @slots: the allocator of the slot
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
 * dma_bounce_slots_find - find the slot of an address
 * @slots: the allocator
 * @addr: an address for which dma_bounce_slots_own() is true
 *
 * The caller is in an RCU read-side critical section.
 *
 * Return: the slot, or NULL if the address has no slot or the slot serves no mapping.
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

/*
 * Returns true if an address is in a chunk without slots. dma_bounce_slots_own() must be true for
 * the address.
 */
static inline bool dma_bounce_slots_whole(struct dma_bounce_slots *slots, dma_addr_t addr)
{
	struct dma_bounce_chunk *chunk;

	chunk = rcu_dereference(slots->chunks[(addr - slots->base) >> slots->chunk_shift]);
	return chunk && READ_ONCE(chunk->state) == DMA_BOUNCE_WHOLE;
}

/**
 * dma_bounce_slots_cached - count the slots that CPUs keep
 * @slots: an open allocator
 * @kind: kind of the slots
 * @class: class of the slots
 *
 * Return: the number of slots, which may already be outdated.
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
 * dma_bounce_slots_served - count the slots that were taken so far
 * @slots: an open allocator
 * @mapped: type of mapping that the slots were taken for
 *
 * Return: the number of slots, which may already be outdated.
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
 * dma_bounce_slots_bytes - count the bytes that were copied so far
 * @slots: an open allocator
 * @to_slot: count the bytes copied to slots, otherwise the bytes copied from slots
 *
 * Return: the number of bytes, which may already be outdated.
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
