// SPDX-License-Identifier: GPL-2.0-only
/*
 * An allocator of bounce buffers
 *
 * Memory comes in *chunks* of 2 MiB, for example. Each chunk has a place in one IOVA range, so that
 * the chunk of an address is found by arithmetic. A chunk is cut into *slots* of one power-of-two
 * size. Chunks, slots and their IOVA are aligned to the slot's size. There are three kinds of
 * chunks: the device may read the chunk, write it, or both.
 *
 * A *depot* holds the free slots of one kind and size: it is a list of chunks, each with a stack of
 * its free slots. In addition, each CPU has a small stack of free slots for each kind and size. So
 * the common case takes no shared lock, and hands out the slot that is most likely in the CPU's
 * cache and TLB. A CPU whose stack is empty or full exchanges half of the stack with the depot. If
 * the depot is empty, the CPU takes a slot from another CPU's stack.
 *
 * The caller supplies the chunks, and decides on their number. A depot with few free slots *asks*
 * the caller for another chunk. To take a chunk back, the caller *withdraws* it if it is idle. If
 * the chunk is in use, the caller *retires* it: its slots are no longer handed out, and the chunk
 * can be removed when its last slot has returned.
 *
 * A chunk is also retired if its memory is lost: when the last device leaves a virtio-iommu domain,
 * the domain loses its windows. Slots that are mapped at that time become orphans: nothing touches
 * their memory any more, and the chunk's place stays taken until the last orphan is unmapped. Users
 * of a slot's memory are in an RCU read-side critical section. The caller waits for these sections
 * to end before it removes the memory.
 */

#ifdef __KERNEL__
#include <linux/cpumask.h>
#include <linux/jiffies.h>
#include <linux/log2.h>
#include <linux/math64.h>
#include <linux/minmax.h>
#include <linux/mm.h>
#include <linux/overflow.h>
#include <linux/slab.h>
#endif

#include "dma-bounce-slots.h"

#ifdef CONFIG_DEBUG_LOCK_ALLOC
struct lockdep_map dma_bounce_cpu_map = STATIC_LOCKDEP_MAP_INIT("dma_bounce_cpu",
								&dma_bounce_cpu_map);
#endif

static struct dma_bounce_depot *depot_of(struct dma_bounce_slots *slots,
					 struct dma_bounce_chunk *chunk)
{
	return &slots->depots[chunk->kind][chunk->class];
}

static bool chunk_idle(struct dma_bounce_chunk *chunk)
{
	return chunk->nfree == chunk->nslots;
}

/*
 * Depots and per-CPU caches. The functions of this section that take a lock do so with interrupts
 * off. Code that few mappings need is in separate functions, which most mappings do not call.
 */

/* Returns @n slots to their depot. @entries have the format of CPUs' caches. */
static void depot_put(struct dma_bounce_slots *slots, struct dma_bounce_depot *depot,
		      const unsigned long *entries, unsigned int n)
{
	struct dma_bounce_chunk *chunk;
	struct dma_bounce_slot *slot;

	raw_spin_lock(&depot->lock);
	for (; n; n--, entries++) {
		slot = dma_bounce_kept_slot(*entries);
		chunk = slot->chunk;
		chunk->free[chunk->nfree++] = slot - chunk->slots;
		if (chunk->state == DMA_BOUNCE_LIVE) {
			depot->nfree++;
			if (list_empty(&chunk->node))
				list_add(&chunk->node, &depot->chunks);
		}
		if (chunk_idle(chunk)) {
			chunk->idle_since = jiffies;
			if (chunk->state != DMA_BOUNCE_LIVE)
				slots->notify(slots);
		}
	}
	raw_spin_unlock(&depot->lock);
}

/*
 * Returns the number of free slots at which a depot of @nslots slots is low. The number is a part
 * of @nslots, at most the number that all CPUs may keep, and at least the number that a CPU takes
 * at once. With fewer, a CPU could take the last slots before the depot asks. Returns 0 if @nslots
 * is very small, because chunks are that small only if memory is short.
 */
static unsigned int low_mark(struct dma_bounce_slots *slots, unsigned int class,
			     unsigned int nslots)
{
	unsigned int part = nslots / DMA_BOUNCE_LOW_PART, cap = READ_ONCE(slots->cap[class]) ?: 1;

	return part ? clamp(part, max(cap / 2, 1U), cap * num_online_cpus()) : 0;
}

/*
 * Records the time if the depot needs all its chunks: if it lost a chunk of @n slots, at most twice
 * the low mark would be free. The factor of two keeps the depot from soon asking again for a chunk
 * that was just given back.
 */
static void depot_look(struct dma_bounce_slots *slots, struct dma_bounce_depot *depot,
		       unsigned int class, unsigned int n)
{
	unsigned int rest = depot->nslots - min(depot->nslots, n);

	if (depot->nfree <= n + 2 * low_mark(slots, class, rest))
		depot->needed_at = jiffies;
}

/* Counts the free slots in the depot and in the stacks that cache_steal() would search. */
static unsigned int slots_left(struct dma_bounce_slots *slots, enum dma_bounce_kind kind,
			       unsigned int class)
{
	unsigned int i, asked = 0, n = slots->depots[kind][class].nfree;

	for_each_cpu_wrap(i, cpu_online_mask, raw_smp_processor_id()) {
		if (asked++ == DMA_BOUNCE_STEAL_CPUS)
			break;
		n += READ_ONCE(per_cpu_ptr(slots->cpus, i)->n[kind][class]);
	}
	return n;
}

/*
 * Returns true if a depot asks for a chunk, after slots were taken from it. If no chunk is added,
 * the depot asks again after DMA_BOUNCE_ASK_AGAIN.
 */
static bool depot_asks(struct dma_bounce_slots *slots, enum dma_bounce_kind kind,
		       unsigned int class)
{
	struct dma_bounce_depot *depot = &slots->depots[kind][class];
	unsigned int mark = low_mark(slots, class, depot->nslots);

	depot_look(slots, depot, class, dma_bounce_per_chunk(slots, class));
	if (!mark || depot->nfree > mark || time_before(jiffies, depot->ask_at) ||
	    slots_left(slots, kind, class) > mark)
		return false;
	depot->ask_at = jiffies + DMA_BOUNCE_ASK_AGAIN;
	WRITE_ONCE(depot->asks, true);
	return true;
}

/* Fills a CPU's stack from the depot. Returns true if the caller must notify the owner. */
static bool cache_refill(struct dma_bounce_slots *slots, struct dma_bounce_cpu *cpu,
			 enum dma_bounce_kind kind, unsigned int class)
{
	struct dma_bounce_depot *depot = &slots->depots[kind][class];
	unsigned int n = cpu->n[kind][class], want = max(READ_ONCE(slots->cap[class]) / 2, 1);
	struct dma_bounce_chunk *chunk;
	bool asks;

	raw_spin_lock(&depot->lock);
	while (n < want) {
		chunk = list_first_entry_or_null(&depot->chunks, struct dma_bounce_chunk, node);
		if (!chunk)
			break;
		cpu->slots[kind][class][n++] =
			(unsigned long)&chunk->slots[chunk->free[--chunk->nfree]];
		depot->nfree--;
		if (!chunk->nfree)
			list_del_init(&chunk->node);
	}
	WRITE_ONCE(cpu->n[kind][class], n);
	asks = depot_asks(slots, kind, class);
	raw_spin_unlock(&depot->lock);
	return asks;
}

/* Moves the @n oldest slots of a CPU's stack to the depot. */
static void cache_flush(struct dma_bounce_slots *slots, struct dma_bounce_cpu *cpu,
			enum dma_bounce_kind kind, unsigned int class, unsigned int n)
{
	unsigned long *stack = cpu->slots[kind][class];
	unsigned int rest = cpu->n[kind][class] - n;

	if (!n)
		return;
	depot_put(slots, &slots->depots[kind][class], stack, n);
	memmove(stack, stack + n, rest * sizeof(*stack));
	WRITE_ONCE(cpu->n[kind][class], rest);
}

/* Counts the slots that were not touched since the last flush. They are at the stack's bottom. */
static unsigned int cache_untouched(struct dma_bounce_cpu *cpu, enum dma_bounce_kind kind,
				    unsigned int class)
{
	unsigned int n = 0;

	while (n < cpu->n[kind][class] && cpu->slots[kind][class][n] & DMA_BOUNCE_UNTOUCHED)
		n++;
	return n;
}

/*
 * Takes a slot from any CPU's stack, because the depot is empty. Searches a limited number of CPUs,
 * because each mapping calls this function while memory is short. Searches online CPUs only,
 * because other CPUs may never have been online. If a CPU goes offline, its slots are not lost.
 * They return to the depots as untouched slots, the second time that the owner looks for idle
 * chunks. If the owner has no memory for a chunk, they return at once.
 */
static struct dma_bounce_slot *
cache_steal(struct dma_bounce_slots *slots, enum dma_bounce_kind kind, unsigned int class,
	    enum dma_bounce_mapped mapped)
{
	unsigned int i, asked = 0;
	struct dma_bounce_slot *slot = NULL;
	struct dma_bounce_cpu *cpu;
	unsigned long flags;

	for_each_cpu_wrap(i, cpu_online_mask, raw_smp_processor_id()) {
		if (slot || asked++ == DMA_BOUNCE_STEAL_CPUS)
			break;
		cpu = per_cpu_ptr(slots->cpus, i);
		if (!READ_ONCE(cpu->n[kind][class]))
			continue;
		local_irq_save(flags);
		dma_bounce_cpu_lock(cpu);
		slot = dma_bounce_cache_pop(cpu, kind, class, mapped);
		dma_bounce_cpu_unlock(cpu);
		local_irq_restore(flags);
	}
	return slot;
}

/**
 * __dma_bounce_slots_get - take a free slot if this CPU's stack is empty
 * @slots: an open allocator
 * @kind: access that the device needs
 * @class: log2 of the slot's size, minus DMA_BOUNCE_MIN_SHIFT
 * @mapped: type of mapping that the slot is for
 *
 * See dma_bounce_slots_get().
 *
 * Return: a slot with its member mapped set, or NULL if no slot is free.
 */
struct dma_bounce_slot *__dma_bounce_slots_get(struct dma_bounce_slots *slots,
					       enum dma_bounce_kind kind, unsigned int class,
					       enum dma_bounce_mapped mapped)
{
	struct dma_bounce_slot *slot;
	struct dma_bounce_cpu *cpu;
	unsigned long flags;
	bool asks = false;

	local_irq_save(flags);
	cpu = raw_cpu_ptr(slots->cpus);
	dma_bounce_cpu_lock(cpu);
	if (!cpu->n[kind][class])
		asks = cache_refill(slots, cpu, kind, class);
	slot = dma_bounce_cache_pop(cpu, kind, class, mapped);
	dma_bounce_cpu_unlock(cpu);
	local_irq_restore(flags);
	if (asks)
		slots->notify(slots);
	return slot ?: cache_steal(slots, kind, class, mapped);
}

/**
 * __dma_bounce_slots_put - return a slot if this CPU's stack is full or the chunk is not live
 * @slots: the allocator of the slot
 * @cpu: cache of this CPU, which is locked
 * @slot: the slot
 *
 * See dma_bounce_slots_put().
 */
void __dma_bounce_slots_put(struct dma_bounce_slots *slots, struct dma_bounce_cpu *cpu,
			    struct dma_bounce_slot *slot)
{
	struct dma_bounce_chunk *chunk = slot->chunk;
	unsigned int kind = chunk->kind, class = chunk->class, n = cpu->n[kind][class];
	unsigned int cap = READ_ONCE(slots->cap[class]);
	unsigned long entry = (unsigned long)slot;

	if (READ_ONCE(chunk->state) != DMA_BOUNCE_LIVE || !cap) {
		depot_put(slots, depot_of(slots, chunk), &entry, 1);
		return;
	}
	/* The limit may have been lowered, so that the stack has more than @cap slots. */
	if (n >= cap)
		cache_flush(slots, cpu, kind, class, n - cap / 2);
	n = cpu->n[kind][class];
	cpu->slots[kind][class][n] = entry;
	WRITE_ONCE(cpu->n[kind][class], n + 1);
}

/**
 * dma_bounce_slots_flush - return slots of all CPUs' stacks to the depots, also of offline CPUs
 * @slots: the allocator
 * @all: return all slots, otherwise only the slots that were not touched since the last flush
 *
 * Call this before withdrawing chunks, because a chunk is not idle while a CPU keeps a slot of it.
 */
void dma_bounce_slots_flush(struct dma_bounce_slots *slots, bool all)
{
	unsigned int kind, class, i, n;
	struct dma_bounce_cpu *cpu;

	for_each_possible_cpu(i) {
		cpu = per_cpu_ptr(slots->cpus, i);
		local_irq_disable();
		dma_bounce_cpu_lock(cpu);
		for (kind = 0; kind < DMA_BOUNCE_KINDS; kind++) {
			for (class = 0; class < DMA_BOUNCE_CLASSES; class++) {
				n = all ? cpu->n[kind][class] : cache_untouched(cpu, kind, class);
				cache_flush(slots, cpu, kind, class, n);
				for (n = 0; n < cpu->n[kind][class]; n++)
					cpu->slots[kind][class][n] |= DMA_BOUNCE_UNTOUCHED;
			}
		}
		dma_bounce_cpu_unlock(cpu);
		local_irq_enable();
	}
}

/**
 * dma_bounce_slots_limit - limit the number of slots that CPUs keep
 * @slots: the allocator
 * @bytes: maximum for all CPUs together, if each of them keeps slots of all kinds and sizes
 *
 * A CPU that has more slots returns the excess to the depot when it next returns a slot.
 */
void dma_bounce_slots_limit(struct dma_bounce_slots *slots, u64 bytes)
{
	unsigned int class, shift;
	u64 each;

	each = div_u64(bytes, num_online_cpus() * DMA_BOUNCE_KINDS * DMA_BOUNCE_CLASSES);
	each = min_t(u64, each, DMA_BOUNCE_CACHE_BYTES);
	for (class = 0; class < DMA_BOUNCE_CLASSES; class++) {
		shift = class + DMA_BOUNCE_MIN_SHIFT;
		WRITE_ONCE(slots->cap[class], min_t(u64, each >> shift, DMA_BOUNCE_CACHE_SLOTS));
	}
}

/* Chunks. The caller of these functions holds the allocator's mutex. */

static unsigned long chunk_place(struct dma_bounce_slots *slots, struct dma_bounce_chunk *chunk)
{
	return (chunk->iova - slots->base) >> slots->chunk_shift;
}

/**
 * dma_bounce_chunk_alloc - allocate the structure of a chunk
 * @kind: access that devices have to the chunk
 * @class: log2 of the size of its slots, minus DMA_BOUNCE_MIN_SHIFT
 * @size: maximum number of bytes of the chunk
 * @node: NUMA node on which the chunk is used, or NUMA_NO_NODE
 *
 * Return: a chunk that the caller publishes or discards, or NULL if there is not enough memory.
 */
struct dma_bounce_chunk *dma_bounce_chunk_alloc(enum dma_bounce_kind kind, unsigned int class,
						size_t size, int node)
{
	unsigned int nslots = size >> (class + DMA_BOUNCE_MIN_SHIFT), i;
	struct dma_bounce_chunk *chunk;
	size_t bytes;

	/* The slots, followed by the stack of free slots */
	bytes = size_add(struct_size(chunk, slots, nslots), array_size(nslots, sizeof(u32)));
	chunk = kvzalloc_node(bytes, GFP_KERNEL | __GFP_NOWARN, node);
	if (!chunk)
		return NULL;
	chunk->nslots = nslots;
	chunk->free = (u32 *)(chunk->slots + nslots);
	chunk->kind = kind;
	chunk->class = class;
	INIT_LIST_HEAD(&chunk->node);
	for (i = 0; i < nslots; i++)
		chunk->slots[i].chunk = chunk;
	return chunk;
}

/**
 * dma_bounce_chunk_discard - free a chunk that was not published
 * @chunk: the chunk, or NULL
 */
void dma_bounce_chunk_discard(struct dma_bounce_chunk *chunk)
{
	kvfree(chunk);
}

/**
 * dma_bounce_chunk_publish - hand out the slots of a chunk, from the lowest address upwards
 * @slots: the allocator
 * @chunk: chunk from dma_bounce_chunk_alloc()
 * @va: memory of the chunk
 * @iova: address for devices, in the range. Its place is free, or has a withdrawn chunk.
 * @size: length in bytes, at least one slot and at most the size of dma_bounce_chunk_alloc()
 */
void dma_bounce_chunk_publish(struct dma_bounce_slots *slots, struct dma_bounce_chunk *chunk,
			      void *va, dma_addr_t iova, size_t size)
{
	struct dma_bounce_depot *depot = depot_of(slots, chunk);
	unsigned int i;

	chunk->va = va;
	chunk->iova = iova;
	chunk->size = size;
	chunk->nslots = size >> (chunk->class + DMA_BOUNCE_MIN_SHIFT);
	for (i = 0; i < chunk->nslots; i++)
		chunk->free[i] = chunk->nslots - 1 - i;
	chunk->nfree = chunk->nslots;
	chunk->idle_since = jiffies;
	rcu_assign_pointer(slots->chunks[chunk_place(slots, chunk)], chunk);

	raw_spin_lock_irq(&depot->lock);
	list_add_tail(&chunk->node, &depot->chunks);
	depot->nslots += chunk->nslots;
	depot->nfree += chunk->nslots;
	WRITE_ONCE(depot->asks, false);
	depot->ask_at = jiffies;
	raw_spin_unlock_irq(&depot->lock);
}

/**
 * dma_bounce_chunk_publish_whole - add a chunk without slots
 * @slots: the allocator
 * @chunk: chunk from dma_bounce_chunk_alloc()
 * @va: memory of the chunk
 * @iova: address for devices, in the range. Its place is free.
 * @size: length in bytes
 * @state: DMA_BOUNCE_WHOLE or DMA_BOUNCE_BLOCKED
 */
void dma_bounce_chunk_publish_whole(struct dma_bounce_slots *slots, struct dma_bounce_chunk *chunk,
				    void *va, dma_addr_t iova, size_t size,
				    enum dma_bounce_chunk_state state)
{
	chunk->va = va;
	chunk->iova = iova;
	chunk->size = size;
	chunk->nslots = 0;
	chunk->state = state;
	rcu_assign_pointer(slots->chunks[chunk_place(slots, chunk)], chunk);
}

/**
 * dma_bounce_chunk_withdraw - withdraw a chunk if it is idle
 * @slots: the allocator
 * @chunk: the chunk
 * @age: minimum time for which the chunk has been idle, in jiffies
 * @spare: also require that the depot did not need the chunk for the same time
 *
 * Return: true if the chunk was withdrawn, so that its slots are no longer handed out. Then the
 * caller removes the chunk, or publishes another chunk at its place.
 */
bool dma_bounce_chunk_withdraw(struct dma_bounce_slots *slots, struct dma_bounce_chunk *chunk,
			       unsigned long age, bool spare)
{
	struct dma_bounce_depot *depot = depot_of(slots, chunk);
	bool idle;

	raw_spin_lock_irq(&depot->lock);
	/* CPUs may have used only their own stacks since depot_look() was last called. */
	depot_look(slots, depot, chunk->class, chunk->nslots);
	idle = chunk->state == DMA_BOUNCE_LIVE && chunk_idle(chunk) &&
	       time_after_eq(jiffies, chunk->idle_since + age) &&
	       (!spare || time_after_eq(jiffies, depot->needed_at + age));
	if (idle) {
		list_del_init(&chunk->node);
		depot->nslots -= chunk->nslots;
		depot->nfree -= chunk->nslots;
		WRITE_ONCE(chunk->state, DMA_BOUNCE_DRAINING);
	}
	raw_spin_unlock_irq(&depot->lock);
	return idle;
}

/**
 * dma_bounce_chunk_retire - stop handing out slots of a chunk
 * @slots: the allocator
 * @chunk: the chunk
 * @state: new state of the chunk
 *
 * Has no effect if the chunk already has this state. The caller must flush the caches afterwards.
 */
void dma_bounce_chunk_retire(struct dma_bounce_slots *slots, struct dma_bounce_chunk *chunk,
			     enum dma_bounce_chunk_state state)
{
	struct dma_bounce_depot *depot = depot_of(slots, chunk);

	raw_spin_lock_irq(&depot->lock);
	if (chunk->state == DMA_BOUNCE_LIVE) {
		list_del_init(&chunk->node);
		depot->nslots -= chunk->nslots;
		depot->nfree -= chunk->nfree;
	}
	WRITE_ONCE(chunk->state, state);
	raw_spin_unlock_irq(&depot->lock);
}

/**
 * dma_bounce_chunk_used - count the slots of a chunk that are not in the depot
 * @slots: the allocator
 * @chunk: the chunk
 *
 * Return: the number of slots. It includes slots that CPUs keep, unless the chunk was retired and
 * the caches were flushed afterwards.
 */
unsigned int dma_bounce_chunk_used(struct dma_bounce_slots *slots, struct dma_bounce_chunk *chunk)
{
	struct dma_bounce_depot *depot = depot_of(slots, chunk);
	unsigned int used;

	raw_spin_lock_irq(&depot->lock);
	used = chunk->nslots - chunk->nfree;
	raw_spin_unlock_irq(&depot->lock);
	return used;
}

/**
 * dma_bounce_chunk_remove - remove a chunk and free its structure
 * @slots: the allocator
 * @chunk: a chunk that was withdrawn, or a retired chunk without used slots. If another chunk was
 *	published at its place, that chunk stays.
 */
void dma_bounce_chunk_remove(struct dma_bounce_slots *slots, struct dma_bounce_chunk *chunk)
{
	unsigned long place = chunk_place(slots, chunk);

	if (dma_bounce_slots_chunk(slots, place) == chunk)
		RCU_INIT_POINTER(slots->chunks[place], NULL);
	kvfree_rcu(chunk, rcu);
}

/**
 * dma_bounce_slots_init - initialise an allocator
 * @slots: the allocator
 * @notify: see &struct dma_bounce_slots
 */
void dma_bounce_slots_init(struct dma_bounce_slots *slots,
			   void (*notify)(struct dma_bounce_slots *slots))
{
	slots->notify = notify;
	mutex_init(&slots->mutex);
}

/**
 * dma_bounce_slots_open - set the IOVA range of an allocator, and make it ready
 * @slots: the allocator
 * @base: first IOVA
 * @len: length in bytes, a multiple of the chunk size
 * @chunk_shift: log2 of the chunk size, at least DMA_BOUNCE_MAX_SHIFT
 *
 * Return: 0, -EINVAL for an invalid range, or -ENOMEM.
 */
int dma_bounce_slots_open(struct dma_bounce_slots *slots, dma_addr_t base, u64 len,
			  unsigned int chunk_shift)
{
	struct dma_bounce_depot (*depots)[DMA_BOUNCE_CLASSES];
	struct dma_bounce_chunk __rcu **chunks;
	struct dma_bounce_cpu __percpu *cpus;
	unsigned int kind, class;

	if (chunk_shift < DMA_BOUNCE_MAX_SHIFT || chunk_shift > 30 || !len ||
	    (base | len) & ((1UL << chunk_shift) - 1) || base + len - 1 < base)
		return -EINVAL;
	chunks = kvcalloc(len >> chunk_shift, sizeof(*chunks), GFP_KERNEL);
	depots = kvcalloc(DMA_BOUNCE_KINDS, sizeof(*depots), GFP_KERNEL);
	/* Page alignment puts the most used stacks on one page, which saves TLB entries. */
	cpus = __alloc_percpu(sizeof(struct dma_bounce_cpu), PAGE_SIZE);
	if (!chunks || !depots || !cpus) {
		kvfree(chunks);
		kvfree(depots);
		free_percpu(cpus);
		return -ENOMEM;
	}
	for (kind = 0; kind < DMA_BOUNCE_KINDS; kind++) {
		for (class = 0; class < DMA_BOUNCE_CLASSES; class++) {
			raw_spin_lock_init(&depots[kind][class].lock);
			INIT_LIST_HEAD(&depots[kind][class].chunks);
		}
	}
	slots->chunks = chunks;
	slots->depots = depots;
	slots->cpus = cpus;
	slots->base = base;
	slots->chunk_shift = chunk_shift;
	dma_bounce_slots_limit(slots, U64_MAX);
	smp_store_release(&slots->len, len);	/* pairs with dma_bounce_slots_own() */
	return 0;
}

/**
 * dma_bounce_slots_close - free the tables of an allocator
 * @slots: an allocator that has no chunks and is no longer used
 */
void dma_bounce_slots_close(struct dma_bounce_slots *slots)
{
	kvfree(slots->chunks);
	kvfree(slots->depots);
	free_percpu(slots->cpus);
}
