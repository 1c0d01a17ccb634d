// SPDX-License-Identifier: GPL-2.0-only
/*
 * An allocator of bounce buffers
 *
 * Memory comes in *chunks* (2 MiB, say), each at its place of one IOVA range, so that the owner of
 * an address is found by arithmetic. A chunk is cut into *slots* of one power-of-two size. Slot,
 * chunk and IOVA are aligned to the slot's size. There are three kinds of chunk, which the device
 * may read, write, or both.
 *
 * Free slots of one kind and size are in a *depot*: a list of chunks, each with a stack of its free
 * slots. In front of it every CPU has a small stack of its own, so that the common case takes no
 * shared lock and hands out the buffer that is most likely in the CPU's cache and TLB. A CPU whose
 * stack is empty or full exchanges half of it with the depot; if that is empty too, it takes a slot
 * that another CPU keeps.
 *
 * Where chunks come from, and when there are to be more or fewer of them, is the caller's business,
 * whom a depot *asks* for more when it has few slots left. A chunk that is wanted back is
 * *withdrawn* if it is idle. One that is in use is *retired*: its slots are not handed out any
 * more, and it can be removed when the last of them has come back. It can be retired because its
 * memory is gone (a virtio-iommu domain ends, and its windows with it, when the last device leaves
 * it). The slots that are mapped then are orphans: nobody touches their memory, and the chunk's
 * place in the range stays taken until the last of them is unmapped. Users of slots' memory are in
 * an RCU read-side critical section, for which to wait before memory goes.
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
 * Depots and per-CPU caches. All of this runs with interrupts off. What few mappings need is kept
 * out of the functions that all of them run through.
 */

/* Puts @n slots into the depot that they are of; @entries are as CPUs keep them. */
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
 * How many free slots of @nslots are few: a part of them, but no more than all CPUs keep, and no
 * less than one takes at once, as it would take the last ones unseen. None are few where there are
 * hardly any: chunks are that small when memory is short.
 */
static unsigned int low_mark(struct dma_bounce_slots *slots, unsigned int class,
			     unsigned int nslots)
{
	unsigned int part = nslots / DMA_BOUNCE_LOW_PART, cap = READ_ONCE(slots->cap[class]) ?: 1;

	return part ? clamp(part, max(cap / 2, 1U), cap * num_online_cpus()) : 0;
}

/*
 * Notes whether a depot could do with a chunk of @n slots less: not if few were free then, or twice
 * as many, so that it does not ask for what it has just given back.
 */
static void depot_look(struct dma_bounce_slots *slots, struct dma_bounce_depot *depot,
		       unsigned int class, unsigned int n)
{
	unsigned int rest = depot->nslots - min(depot->nslots, n);

	if (depot->nfree <= n + 2 * low_mark(slots, class, rest))
		depot->needed_at = jiffies;
}

/* Free slots that this CPU can have: of the depot, and of the CPUs that it asks if that has none */
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

/* Whether a depot of which slots were taken asks for a chunk now. If none comes, not again soon. */
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

/* Returns whether the owner is to be notified. */
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

/* Returns the @n slots that the CPU has had for longest to the depot. */
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

/* Counts the slots that were not touched since caches were flushed last. They are at the bottom. */
static unsigned int cache_untouched(struct dma_bounce_cpu *cpu, enum dma_bounce_kind kind,
				    unsigned int class)
{
	unsigned int n = 0;

	while (n < cpu->n[kind][class] && cpu->slots[kind][class][n] & DMA_BOUNCE_UNTOUCHED)
		n++;
	return n;
}

/*
 * The depot is empty: take a slot that another CPU keeps. Of many CPUs only some are asked, as this
 * is what each mapping does while there is too little memory, and of those that are online, as
 * others may never have been. What a CPU keeps when it goes offline is not lost: nobody touches it,
 * so caches give it back the second time that the owner looks for idle chunks, or at once when it
 * has no memory for a chunk.
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
 * __dma_bounce_slots_get - take a slot that this CPU does not keep
 * @slots: an allocator that is open
 * @kind: what the device may do with it
 * @class: log2 of its size, less DMA_BOUNCE_MIN_SHIFT
 * @mapped: what for
 *
 * See dma_bounce_slots_get().
 *
 * Return: a slot that has @mapped set, or NULL if there is none now.
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
 * __dma_bounce_slots_put - give a slot back that this CPU does not just keep
 * @slots: its allocator
 * @cpu: what this CPU keeps, which is locked
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
	/* It may have kept more than it is to keep now. */
	if (n >= cap)
		cache_flush(slots, cpu, kind, class, n - cap / 2);
	n = cpu->n[kind][class];
	cpu->slots[kind][class][n] = entry;
	WRITE_ONCE(cpu->n[kind][class], n + 1);
}

/**
 * dma_bounce_slots_flush - have CPUs give back the slots that they keep, those offline too
 * @slots: the allocator
 * @all: all of them; otherwise those that were not touched since the last time
 *
 * To be called before chunks are withdrawn, as kept slots hide idle chunks.
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
 * dma_bounce_slots_limit - say how many slots CPUs may keep
 * @slots: the allocator
 * @bytes: most that all CPUs keep together, if each has kept all kinds and sizes
 *
 * What they keep above that goes when they give slots back.
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

/* Chunks. All of this runs under the mutex. */

static unsigned long chunk_place(struct dma_bounce_slots *slots, struct dma_bounce_chunk *chunk)
{
	return (chunk->iova - slots->base) >> slots->chunk_shift;
}

/**
 * dma_bounce_chunk_alloc - allocate what describes a chunk
 * @kind: what devices may do with it
 * @class: log2 of the size of its slots, less DMA_BOUNCE_MIN_SHIFT
 * @size: most bytes that it will have
 * @node: NUMA node on which it is used, or NUMA_NO_NODE
 *
 * Return: a chunk to be published or discarded, or NULL if there is not enough memory.
 */
struct dma_bounce_chunk *dma_bounce_chunk_alloc(enum dma_bounce_kind kind, unsigned int class,
						size_t size, int node)
{
	unsigned int nslots = size >> (class + DMA_BOUNCE_MIN_SHIFT), i;
	struct dma_bounce_chunk *chunk;
	size_t bytes;

	/* The slots, then the stack of free ones */
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
 * dma_bounce_chunk_publish - hand out the slots of a chunk, those with the lowest addresses first
 * @slots: the allocator
 * @chunk: from dma_bounce_chunk_alloc()
 * @va: its memory
 * @iova: where devices see it: in the range, at the place of no other chunk but one withdrawn
 * @size: its bytes, at least one slot and no more than it was allocated for
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
 * dma_bounce_chunk_publish_whole - use a chunk as a whole, until it is removed
 * @slots: the allocator
 * @chunk: from dma_bounce_chunk_alloc()
 * @va: its memory
 * @iova: where devices see it: in the range, at the place of no other chunk
 * @size: its bytes
 */
void dma_bounce_chunk_publish_whole(struct dma_bounce_slots *slots, struct dma_bounce_chunk *chunk,
				    void *va, dma_addr_t iova, size_t size)
{
	chunk->va = va;
	chunk->iova = iova;
	chunk->size = size;
	chunk->nslots = 0;
	chunk->state = DMA_BOUNCE_WHOLE;
	rcu_assign_pointer(slots->chunks[chunk_place(slots, chunk)], chunk);
}

/**
 * dma_bounce_chunk_withdraw - take a chunk away if it is idle
 * @slots: the allocator
 * @chunk: the chunk
 * @age: and has been for this many jiffies
 * @spare: and the depot could have done without it for as long
 *
 * Return: whether it was, and is not handed out any more; then it is to be removed, or another one
 * published at its place.
 */
bool dma_bounce_chunk_withdraw(struct dma_bounce_slots *slots, struct dma_bounce_chunk *chunk,
			       unsigned long age, bool spare)
{
	struct dma_bounce_depot *depot = depot_of(slots, chunk);
	bool idle;

	raw_spin_lock_irq(&depot->lock);
	/* CPUs may have gone on for long with what they keep, and taken none. */
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
 * dma_bounce_chunk_retire - hand out no more slots of a chunk
 * @slots: the allocator
 * @chunk: the chunk
 * @state: what becomes of it
 *
 * Does nothing to a chunk that is in this state already. Caches are to be flushed afterwards.
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
 * dma_bounce_chunk_used - count slots of a chunk that are not in the depot
 * @slots: the allocator
 * @chunk: the chunk
 *
 * Return: their number. Among them may be slots that CPUs keep, unless the chunk was retired and
 * caches were flushed since.
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
 * dma_bounce_chunk_remove - forget a chunk
 * @slots: the allocator
 * @chunk: one that was withdrawn, or retired and then unused. If another one was published at its
 *	place, that stays.
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
 * dma_bounce_slots_open - say where the chunks of an allocator will be
 * @slots: the allocator
 * @base: first IOVA
 * @len: bytes, a multiple of a chunk
 * @chunk_shift: log2 of the bytes of a chunk, at least DMA_BOUNCE_MAX_SHIFT
 *
 * Return: 0, -EINVAL for a range that makes no sense, or -ENOMEM.
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
	/* The stacks that are used most are on one page, to save translations. */
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
 * dma_bounce_slots_close - free an allocator
 * @slots: one whose chunks are removed and that nobody uses any more
 */
void dma_bounce_slots_close(struct dma_bounce_slots *slots)
{
	kvfree(slots->chunks);
	kvfree(slots->depots);
	free_percpu(slots->cpus);
}
