// SPDX-License-Identifier: GPL-2.0-only
/*
 * A pool of bounce buffers that stay mapped in the IOMMU
 *
 * Where changing a mapping is dear (each change is a request to the host, in a guest with a virtual
 * IOMMU), copying a small buffer costs less than mapping and unmapping it. Each DMA domain that
 * bounces has a pool:
 *
 *  - A provider maps memory in *chunks* (2 MiB, say) into one IOVA range. The number of a chunk is
 *    its place in that range, so the owner of an address is found by arithmetic. Host-owned windows
 *    of virtio-iommu and pages of the guest are the two providers.
 *  - A chunk is cut into *slots* of one power-of-two size. Slot, chunk and IOVA are aligned to the
 *    slot's size. There are three kinds of chunk, which the device may read, write, or both.
 *  - Free slots of one kind and size are in a *depot*: a list of chunks, each with a stack of its
 *    free slots. In front of it every CPU has a small stack of its own, so that the common case
 *    takes no shared lock and hands out the buffer that is most likely in the CPU's cache and TLB.
 *  - When a mapping finds no slot it goes the ordinary way, and a work item adds chunks (mappings
 *    come with interrupts off, adding a chunk can sleep). At the budget's end, chunks that nobody
 *    has used for a while are cut anew for the size in demand.
 *
 * A chunk can die while slots of it are mapped: a virtio-iommu domain ends, and its windows with
 * it, when the last device leaves it. Those slots are orphans: their memory is not touched any
 * more, and the chunk's place in the range stays taken until the last of them is unmapped. Users of
 * slots' memory are in an RCU read-side critical section, which is what dma_bounce_pool_stop()
 * waits for.
 */

#define pr_fmt(fmt) "iommu: bounce: " fmt

#include <linux/idr.h>
#include <linux/iova.h>
#include <linux/jiffies.h>
#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/slab.h>

#include "dma-bounce-pool.h"

/* How long a chunk must have been idle before it is cut anew */
#define DMA_BOUNCE_IDLE		HZ
/* How long to wait before a failed attempt to add a chunk is repeated */
#define DMA_BOUNCE_RETRY	(HZ / 4)

static LIST_HEAD(dma_bounce_pools);
static DEFINE_MUTEX(dma_bounce_pools_lock);
static DEFINE_IDA(dma_bounce_ida);

static const int dma_bounce_prot[DMA_BOUNCE_KINDS] = {
	[DMA_BOUNCE_READ]	= IOMMU_READ,
	[DMA_BOUNCE_WRITE]	= IOMMU_WRITE,
	[DMA_BOUNCE_RW]		= IOMMU_READ | IOMMU_WRITE,
};

static unsigned int cache_slots(unsigned int class)
{
	return clamp_t(unsigned int, DMA_BOUNCE_CACHE_BYTES >> (class + DMA_BOUNCE_MIN_SHIFT),
		       DMA_BOUNCE_CACHE_MIN, DMA_BOUNCE_CACHE_SLOTS);
}

/* Depots and per-CPU caches */

static struct dma_bounce_depot *depot_of(struct dma_bounce_pool *pool,
					 struct dma_bounce_chunk *chunk)
{
	return &pool->depots[chunk->kind][chunk->class];
}

static bool chunk_idle(struct dma_bounce_chunk *chunk)
{
	return chunk->nfree == chunk->nslots;
}

static void depot_put(struct dma_bounce_pool *pool, struct dma_bounce_slot *slot)
{
	struct dma_bounce_chunk *chunk = slot->chunk;
	struct dma_bounce_depot *depot = depot_of(pool, chunk);

	spin_lock(&depot->lock);
	chunk->free[chunk->nfree++] = slot - chunk->slots;
	if (!chunk->dead) {
		depot->nfree++;
		if (list_empty(&chunk->node))
			list_add(&chunk->node, &depot->chunks);
	}
	if (chunk_idle(chunk)) {
		chunk->idle_since = jiffies;
		if (chunk->dead)
			queue_work(system_unbound_wq, &pool->work);
	}
	spin_unlock(&depot->lock);
}

static void cache_refill(struct dma_bounce_pool *pool, struct dma_bounce_cpu *cpu,
			 enum dma_bounce_kind kind, unsigned int class)
{
	struct dma_bounce_depot *depot = &pool->depots[kind][class];
	unsigned int n = cpu->n[kind][class], want = cache_slots(class) / 2;
	struct dma_bounce_chunk *chunk;

	spin_lock(&depot->lock);
	while (n < want) {
		chunk = list_first_entry_or_null(&depot->chunks, struct dma_bounce_chunk, node);
		if (!chunk)
			break;
		cpu->slots[kind][class][n++] = &chunk->slots[chunk->free[--chunk->nfree]];
		depot->nfree--;
		if (!chunk->nfree)
			list_del_init(&chunk->node);
	}
	spin_unlock(&depot->lock);
	cpu->n[kind][class] = n;
}

/* Returns the @n slots that the CPU has had for longest to the depot. */
static void cache_flush(struct dma_bounce_pool *pool, struct dma_bounce_cpu *cpu,
			enum dma_bounce_kind kind, unsigned int class, unsigned int n)
{
	struct dma_bounce_slot **slots = cpu->slots[kind][class];
	unsigned int i;

	for (i = 0; i < n; i++)
		depot_put(pool, slots[i]);
	cpu->n[kind][class] -= n;
	memmove(slots, slots + n, cpu->n[kind][class] * sizeof(*slots));
}

static void flush_all_caches(struct dma_bounce_pool *pool)
{
	unsigned int kind, class, i;
	struct dma_bounce_cpu *cpu;

	for_each_possible_cpu(i) {
		cpu = per_cpu_ptr(pool->cpus, i);
		spin_lock_irq(&cpu->lock);
		for (kind = 0; kind < DMA_BOUNCE_KINDS; kind++)
			for (class = 0; class < DMA_BOUNCE_CLASSES; class++)
				cache_flush(pool, cpu, kind, class, cpu->n[kind][class]);
		spin_unlock_irq(&cpu->lock);
	}
}

/* The depot is empty: take a slot that another CPU keeps. */
static struct dma_bounce_slot *cache_steal(struct dma_bounce_pool *pool, enum dma_bounce_kind kind,
					   unsigned int class)
{
	struct dma_bounce_slot *slot = NULL;
	struct dma_bounce_cpu *cpu;
	unsigned long flags;
	unsigned int i;

	for_each_possible_cpu(i) {
		cpu = per_cpu_ptr(pool->cpus, i);
		if (!READ_ONCE(cpu->n[kind][class]))
			continue;
		spin_lock_irqsave(&cpu->lock, flags);
		if (cpu->n[kind][class])
			slot = cpu->slots[kind][class][--cpu->n[kind][class]];
		spin_unlock_irqrestore(&cpu->lock, flags);
		if (slot)
			break;
	}
	return slot;
}

static void note_miss(struct dma_bounce_pool *pool, enum dma_bounce_kind kind, unsigned int class)
{
	atomic_inc(&pool->missed[kind][class]);
	if (time_after_eq(jiffies, READ_ONCE(pool->retry_at)))
		queue_work(system_unbound_wq, &pool->work);
}

/**
 * dma_bounce_slot_get - take a free slot
 * @pool: a pool that is ready, as dma_bounce_owns() or pool->len tells
 * @kind: what the device may do with it
 * @size: bytes needed, at most DMA_BOUNCE_MAX_SLOT
 *
 * The caller is in an RCU read-side critical section until it is done with the slot's memory.
 *
 * Return: a slot whose size is the next power of two, or NULL if there is none now.
 */
struct dma_bounce_slot *dma_bounce_slot_get(struct dma_bounce_pool *pool,
					    enum dma_bounce_kind kind, size_t size)
{
	unsigned int class = max(order_base_2(size), DMA_BOUNCE_MIN_SHIFT) - DMA_BOUNCE_MIN_SHIFT;
	struct dma_bounce_slot *slot = NULL;
	struct dma_bounce_cpu *cpu;
	unsigned long flags;

	cpu = raw_cpu_ptr(pool->cpus);
	spin_lock_irqsave(&cpu->lock, flags);
	if (!cpu->n[kind][class])
		cache_refill(pool, cpu, kind, class);
	if (cpu->n[kind][class])
		slot = cpu->slots[kind][class][--cpu->n[kind][class]];
	spin_unlock_irqrestore(&cpu->lock, flags);

	if (!slot)
		slot = cache_steal(pool, kind, class);
	if (!slot)
		note_miss(pool, kind, class);
	return slot;
}

/**
 * dma_bounce_slot_put - give a slot back
 * @pool: its pool
 * @slot: a slot from dma_bounce_slot_get()
 *
 * The slot's chunk may have died meanwhile.
 */
void dma_bounce_slot_put(struct dma_bounce_pool *pool, struct dma_bounce_slot *slot)
{
	struct dma_bounce_chunk *chunk = slot->chunk;
	unsigned int kind = chunk->kind, class = chunk->class;
	struct dma_bounce_cpu *cpu;
	unsigned long flags;

	slot->len = 0;
	cpu = raw_cpu_ptr(pool->cpus);
	spin_lock_irqsave(&cpu->lock, flags);
	if (unlikely(READ_ONCE(chunk->dead))) {
		depot_put(pool, slot);
	} else {
		if (cpu->n[kind][class] == cache_slots(class))
			cache_flush(pool, cpu, kind, class, cache_slots(class) / 2);
		cpu->slots[kind][class][cpu->n[kind][class]++] = slot;
	}
	spin_unlock_irqrestore(&cpu->lock, flags);
}

/**
 * dma_bounce_slot_find - find the slot that an address belongs to
 * @pool: the pool
 * @addr: an address for which dma_bounce_owns() is true
 *
 * The caller is in an RCU read-side critical section.
 *
 * Return: the slot, or NULL if there is none or nothing is mapped by it.
 */
struct dma_bounce_slot *dma_bounce_slot_find(struct dma_bounce_pool *pool, dma_addr_t addr)
{
	struct dma_bounce_chunk *chunk;
	unsigned long number;

	chunk = rcu_dereference(pool->chunks[(addr - pool->base) >> pool->chunk_shift]);
	if (!chunk)
		return NULL;
	number = (addr - chunk->iova) >> (chunk->class + DMA_BOUNCE_MIN_SHIFT);
	if (number >= chunk->nslots || !chunk->slots[number].len)
		return NULL;
	return &chunk->slots[number];
}

/* Chunks. All of this runs under the pool's mutex. */

static struct dma_bounce_chunk *pool_chunk(struct dma_bounce_pool *pool, unsigned long i)
{
	return rcu_dereference_protected(pool->chunks[i], lockdep_is_held(&pool->mutex));
}

static unsigned long pool_places(struct dma_bounce_pool *pool)
{
	return pool->len >> pool->chunk_shift;
}

static unsigned long chunk_place(struct dma_bounce_pool *pool, struct dma_bounce_chunk *chunk)
{
	return (chunk->iova - pool->base) >> pool->chunk_shift;
}

static struct dma_bounce_chunk *chunk_alloc(unsigned int kind, unsigned int class, size_t size)
{
	unsigned int nslots = size >> (class + DMA_BOUNCE_MIN_SHIFT), i;
	struct dma_bounce_chunk *chunk;
	size_t bytes;

	/* The slots, then the stack of free ones */
	bytes = size_add(struct_size(chunk, slots, nslots), array_size(nslots, sizeof(u32)));
	chunk = kvzalloc(bytes, GFP_KERNEL | __GFP_NOWARN);
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

/* Lets mappings have the chunk's slots, those with the lowest addresses first. */
static void chunk_publish(struct dma_bounce_pool *pool, struct dma_bounce_chunk *chunk)
{
	struct dma_bounce_depot *depot = depot_of(pool, chunk);
	unsigned int i;

	for (i = 0; i < chunk->nslots; i++)
		chunk->free[i] = chunk->nslots - 1 - i;
	chunk->nfree = chunk->nslots;
	chunk->idle_since = jiffies;
	rcu_assign_pointer(pool->chunks[chunk_place(pool, chunk)], chunk);

	spin_lock_irq(&depot->lock);
	list_add_tail(&chunk->node, &depot->chunks);
	depot->nslots += chunk->nslots;
	depot->nfree += chunk->nslots;
	spin_unlock_irq(&depot->lock);
}

/* Takes a chunk away from mappings if none of its slots is in use, nor was for @age jiffies. */
static bool chunk_withdraw(struct dma_bounce_pool *pool, struct dma_bounce_chunk *chunk,
			   unsigned long age)
{
	struct dma_bounce_depot *depot = depot_of(pool, chunk);
	bool idle;

	spin_lock_irq(&depot->lock);
	idle = !chunk->dead && chunk_idle(chunk) &&
	       time_after_eq(jiffies, chunk->idle_since + age);
	if (idle) {
		list_del_init(&chunk->node);
		depot->nslots -= chunk->nslots;
		depot->nfree -= chunk->nslots;
	}
	spin_unlock_irq(&depot->lock);
	return idle;
}

static void chunk_unmap(struct dma_bounce_pool *pool, struct dma_bounce_chunk *chunk)
{
	pool->ops->del(pool->domain, chunk->iova, chunk->va, chunk->size);
	pool->backed -= chunk->size;
	pool->nchunks--;
	pool->dels++;
}

static void chunk_free(struct dma_bounce_pool *pool, struct dma_bounce_chunk *chunk)
{
	RCU_INIT_POINTER(pool->chunks[chunk_place(pool, chunk)], NULL);
	kvfree_rcu(chunk, rcu);
}

static int chunk_add(struct dma_bounce_pool *pool, unsigned int kind, unsigned int class)
{
	size_t size = 1UL << pool->chunk_shift;
	struct dma_bounce_chunk *chunk;
	unsigned long place;
	void *va;

	if (pool->backed + size > pool->budget)
		return -ENOMEM;
	for (place = 0; place < pool_places(pool); place++)
		if (!pool_chunk(pool, place))
			break;
	if (place == pool_places(pool))
		return -ENOMEM;
	chunk = chunk_alloc(kind, class, size);
	if (!chunk)
		return -ENOMEM;
	chunk->iova = pool->base + ((dma_addr_t)place << pool->chunk_shift);
	va = pool->ops->add(pool->domain, chunk->iova, &size, dma_bounce_prot[kind]);
	if (IS_ERR(va)) {
		kvfree(chunk);
		return PTR_ERR(va);
	}
	chunk->va = va;
	chunk->size = size;
	chunk->nslots = size >> (class + DMA_BOUNCE_MIN_SHIFT);
	pool->backed += size;
	pool->peak = max(pool->peak, pool->backed);
	pool->nchunks++;
	pool->adds++;
	chunk_publish(pool, chunk);
	return 0;
}

static struct dma_bounce_chunk *find_idle_chunk(struct dma_bounce_pool *pool, unsigned int kind,
						unsigned long age)
{
	struct dma_bounce_chunk *chunk;
	unsigned long place;

	/* One of the same kind needs no request: look for that first. */
	for (place = 0; place < pool_places(pool); place++) {
		chunk = pool_chunk(pool, place);
		if (chunk && chunk->kind == kind && chunk_withdraw(pool, chunk, age))
			return chunk;
	}
	for (place = 0; place < pool_places(pool); place++) {
		chunk = pool_chunk(pool, place);
		if (chunk && chunk_withdraw(pool, chunk, age))
			return chunk;
	}
	return NULL;
}

/* Cuts an idle chunk anew, for slots that are in demand. */
static int chunk_recycle(struct dma_bounce_pool *pool, unsigned int kind, unsigned int class)
{
	struct dma_bounce_chunk *old, *chunk;

	old = find_idle_chunk(pool, kind, DMA_BOUNCE_IDLE);
	if (!old) {
		/* Slots in CPUs' caches hide idle chunks; they show next time. */
		flush_all_caches(pool);
		return -ENOMEM;
	}
	pool->recycled++;
	chunk = old->kind == kind ? chunk_alloc(kind, class, old->size) : NULL;
	if (chunk && chunk->nslots) {
		chunk->iova = old->iova;
		chunk->va = old->va;
		chunk->size = old->size;
		chunk_publish(pool, chunk);
		kvfree_rcu(old, rcu);
		return 0;
	}
	kvfree(chunk);
	chunk_unmap(pool, old);
	chunk_free(pool, old);
	return chunk_add(pool, kind, class);
}

/* Makes room for mappings that found no slot, at most doubling what there is. */
static void pool_grow(struct dma_bounce_pool *pool, unsigned int kind, unsigned int class)
{
	unsigned int missed = atomic_xchg(&pool->missed[kind][class], 0);
	unsigned int per_chunk = 1U << (pool->chunk_shift - class - DMA_BOUNCE_MIN_SHIFT);
	unsigned int have = pool->depots[kind][class].nslots / per_chunk;
	unsigned int want = min(DIV_ROUND_UP(missed, per_chunk), have + 1);
	int ret = 0;

	while (want-- && !ret) {
		ret = chunk_add(pool, kind, class);
		if (ret == -ENOMEM)
			ret = chunk_recycle(pool, kind, class);
	}
	if (ret) {
		pool->failures++;
		WRITE_ONCE(pool->retry_at, jiffies + DMA_BOUNCE_RETRY);
	}
}

/* Frees what is left of dead chunks whose last orphan is gone. */
static void pool_reap(struct dma_bounce_pool *pool)
{
	struct dma_bounce_chunk *chunk;
	struct dma_bounce_depot *depot;
	unsigned long place;
	bool done;

	for (place = 0; place < pool_places(pool); place++) {
		chunk = pool_chunk(pool, place);
		if (!chunk || !chunk->dead)
			continue;
		depot = depot_of(pool, chunk);
		spin_lock_irq(&depot->lock);
		done = chunk_idle(chunk);
		spin_unlock_irq(&depot->lock);
		if (done)
			chunk_free(pool, chunk);
	}
}

static void pool_shrink(struct dma_bounce_pool *pool, unsigned int surplus)
{
	struct dma_bounce_chunk *chunk;

	if (surplus)
		flush_all_caches(pool);
	while (surplus--) {
		chunk = find_idle_chunk(pool, DMA_BOUNCE_READ, 0);
		if (!chunk)
			break;
		chunk_unmap(pool, chunk);
		chunk_free(pool, chunk);
	}
}

static void pool_read_limits(struct dma_bounce_pool *pool, struct iommu_bounce_limits *limits)
{
	size_t threshold = dma_bounce_threshold_option() ?: limits->threshold;

	pool->budget = limits->budget;
	threshold = min_not_zero(threshold, (size_t)DMA_BOUNCE_MAX_SLOT);
	WRITE_ONCE(pool->threshold, threshold);
}

/* Makes the pool ready to be used: it is the first mapping that brings us here. */
static int pool_start(struct dma_bounce_pool *pool)
{
	struct iommu_bounce_limits limits = {};
	struct dma_bounce_cpu __percpu *cpus;
	unsigned int i;
	int ret;

	ret = pool->ops->limits(pool->domain, &limits);
	if (ret)
		return ret;
	if (!is_power_of_2(limits.chunk_size) || limits.chunk_size < DMA_BOUNCE_MAX_SLOT ||
	    limits.len < limits.chunk_size || (limits.iova | limits.len) & (limits.chunk_size - 1))
		return -EINVAL;
	cpus = alloc_percpu(struct dma_bounce_cpu);
	if (!cpus)
		return -ENOMEM;
	for_each_possible_cpu(i)
		spin_lock_init(&per_cpu_ptr(cpus, i)->lock);
	pool->chunks = kvcalloc(limits.len >> ilog2(limits.chunk_size), sizeof(*pool->chunks),
				GFP_KERNEL);
	if (!pool->chunks) {
		free_percpu(cpus);
		return -ENOMEM;
	}
	pool->cpus = cpus;
	pool->base = limits.iova;
	pool->chunk_shift = ilog2(limits.chunk_size);
	pool_read_limits(pool, &limits);
	smp_store_release(&pool->len, limits.len);	/* pairs with dma_bounce_owns() */
	return 0;
}

static void pool_work(struct work_struct *work)
{
	struct dma_bounce_pool *pool = container_of(work, struct dma_bounce_pool, work);
	struct iommu_bounce_limits limits = {};
	unsigned int kind, class;

	mutex_lock(&pool->mutex);
	if (!pool->len) {
		if (!pool->active || !READ_ONCE(pool->mask))
			goto out;
		if (pool_start(pool)) {
			pool->failures++;
			WRITE_ONCE(pool->retry_at, jiffies + DMA_BOUNCE_RETRY);
			goto out;
		}
	}
	pool_reap(pool);
	if (!pool->active)
		goto out;
	if (xchg(&pool->refresh, false) && !pool->ops->limits(pool->domain, &limits)) {
		pool_read_limits(pool, &limits);
		pool_shrink(pool, limits.surplus);
		WRITE_ONCE(pool->retry_at, jiffies);
	}
	for (kind = 0; kind < DMA_BOUNCE_KINDS; kind++)
		for (class = 0; class < DMA_BOUNCE_CLASSES; class++)
			if (atomic_read(&pool->missed[kind][class]))
				pool_grow(pool, kind, class);
out:
	mutex_unlock(&pool->mutex);
}

/**
 * dma_bounce_pool_first_use - a device of the pool's domain maps something
 * @pool: a pool that is not ready yet
 * @mask: what the device can address. A driver sets it after the domain is made, so the pool's IOVA
 *	is chosen only now.
 */
void dma_bounce_pool_first_use(struct dma_bounce_pool *pool, u64 mask)
{
	if (time_before(jiffies, READ_ONCE(pool->retry_at)))
		return;
	WRITE_ONCE(pool->mask, mask);
	queue_work(system_unbound_wq, &pool->work);
}

/* Ends all chunks. Slots that are mapped become orphans. */
static void pool_kill(struct dma_bounce_pool *pool)
{
	struct dma_bounce_chunk *chunk;
	struct dma_bounce_depot *depot;
	unsigned long place;

	if (!pool->len)
		return;
	for (place = 0; place < pool_places(pool); place++) {
		chunk = pool_chunk(pool, place);
		if (!chunk || chunk->dead)
			continue;
		depot = depot_of(pool, chunk);
		spin_lock_irq(&depot->lock);
		WRITE_ONCE(chunk->dead, true);
		list_del_init(&chunk->node);
		depot->nslots -= chunk->nslots;
		depot->nfree -= chunk->nfree;
		spin_unlock_irq(&depot->lock);
	}
	flush_all_caches(pool);
	/* Whoever is copying to or from a slot finishes. */
	synchronize_rcu();
	for (place = 0; place < pool_places(pool); place++) {
		chunk = pool_chunk(pool, place);
		if (!chunk || !chunk->va)
			continue;
		chunk_unmap(pool, chunk);
		chunk->va = NULL;
		pool->orphaned += chunk->nslots - chunk->nfree;
	}
	pool_reap(pool);
}

/**
 * dma_bounce_pool_stop - the last device is about to leave the domain
 * @pool: its pool
 *
 * Gives all chunks back. May sleep.
 */
void dma_bounce_pool_stop(struct dma_bounce_pool *pool)
{
	mutex_lock(&pool->mutex);
	pool->active = false;
	pool_kill(pool);
	mutex_unlock(&pool->mutex);
}

/**
 * dma_bounce_pool_resume - a device was attached to a domain that had none
 * @pool: its pool
 *
 * Chunks are added as mappings need them.
 */
void dma_bounce_pool_resume(struct dma_bounce_pool *pool)
{
	mutex_lock(&pool->mutex);
	pool->active = true;
	WRITE_ONCE(pool->retry_at, jiffies);
	mutex_unlock(&pool->mutex);
}

/**
 * dma_bounce_pool_refresh - have the provider's limits read again
 * @pool: the pool; may be called in any context
 */
void dma_bounce_pool_refresh(struct dma_bounce_pool *pool)
{
	WRITE_ONCE(pool->refresh, true);
	queue_work(system_unbound_wq, &pool->work);
}

/**
 * iommu_dma_bounce_stop - the last device is about to leave a domain
 * @domain: the domain, which need not be one that bounces
 *
 * For IOMMU drivers whose domains lose the chunks of their provider then. To be called before the
 * device leaves. May sleep.
 */
void iommu_dma_bounce_stop(struct iommu_domain *domain)
{
	if (domain->bounce)
		dma_bounce_pool_stop(domain->bounce);
}
EXPORT_SYMBOL_GPL(iommu_dma_bounce_stop);

/**
 * iommu_dma_bounce_start - the first device was attached to a domain
 * @domain: the domain, which need not be one that bounces
 *
 * The opposite of iommu_dma_bounce_stop().
 */
void iommu_dma_bounce_start(struct iommu_domain *domain)
{
	if (domain->bounce)
		dma_bounce_pool_resume(domain->bounce);
}
EXPORT_SYMBOL_GPL(iommu_dma_bounce_start);

/**
 * iommu_dma_bounce_limits_changed - a provider's limits have changed
 * @ops: the provider
 *
 * May sleep.
 */
void iommu_dma_bounce_limits_changed(const struct iommu_bounce_ops *ops)
{
	struct dma_bounce_pool *pool;

	mutex_lock(&dma_bounce_pools_lock);
	list_for_each_entry(pool, &dma_bounce_pools, list)
		if (pool->ops == ops)
			dma_bounce_pool_refresh(pool);
	mutex_unlock(&dma_bounce_pools_lock);
}
EXPORT_SYMBOL_GPL(iommu_dma_bounce_limits_changed);

/**
 * dma_bounce_pool_create - make the pool of a domain
 * @domain: the domain
 * @iovad: its IOVA allocator
 * @ops: where its memory comes from
 * @name: of the first device, for messages
 *
 * The pool takes memory and IOVA only when something is mapped.
 *
 * Return: the pool, or NULL if there is not enough memory.
 */
struct dma_bounce_pool *dma_bounce_pool_create(struct iommu_domain *domain,
					       struct iova_domain *iovad,
					       const struct iommu_bounce_ops *ops, const char *name)
{
	struct dma_bounce_pool *pool;
	unsigned int kind, class;

	pool = kzalloc(sizeof(*pool), GFP_KERNEL);
	if (!pool)
		return NULL;
	pool->name = kstrdup(name, GFP_KERNEL);
	pool->stats = alloc_percpu(struct dma_bounce_stats);
	pool->id = ida_alloc(&dma_bounce_ida, GFP_KERNEL);
	if (!pool->name || !pool->stats || pool->id < 0)
		goto err_free;
	pool->domain = domain;
	pool->iovad = iovad;
	pool->ops = ops;
	pool->active = true;
	pool->retry_at = jiffies;
	mutex_init(&pool->mutex);
	INIT_WORK(&pool->work, pool_work);
	for (kind = 0; kind < DMA_BOUNCE_KINDS; kind++) {
		for (class = 0; class < DMA_BOUNCE_CLASSES; class++) {
			spin_lock_init(&pool->depots[kind][class].lock);
			INIT_LIST_HEAD(&pool->depots[kind][class].chunks);
		}
	}
	mutex_lock(&dma_bounce_pools_lock);
	list_add(&pool->list, &dma_bounce_pools);
	dma_bounce_debugfs_add(pool);
	mutex_unlock(&dma_bounce_pools_lock);
	return pool;

err_free:
	if (pool->id >= 0)
		ida_free(&dma_bounce_ida, pool->id);
	free_percpu(pool->stats);
	kfree(pool->name);
	kfree(pool);
	return NULL;
}

/**
 * dma_bounce_pool_destroy - free the pool of a domain that no device is attached to any more
 * @pool: the pool; slots that are still mapped are forgotten
 */
void dma_bounce_pool_destroy(struct dma_bounce_pool *pool)
{
	struct dma_bounce_chunk *chunk;
	unsigned long place;

	mutex_lock(&dma_bounce_pools_lock);
	list_del(&pool->list);
	mutex_unlock(&dma_bounce_pools_lock);
	disable_work_sync(&pool->work);
	dma_bounce_debugfs_del(pool);

	mutex_lock(&pool->mutex);
	pool->active = false;
	pool_kill(pool);
	for (place = 0; place < pool_places(pool); place++) {
		chunk = pool_chunk(pool, place);
		if (chunk)
			chunk_free(pool, chunk);
	}
	mutex_unlock(&pool->mutex);

	kvfree(pool->chunks);
	free_percpu(pool->cpus);
	ida_free(&dma_bounce_ida, pool->id);
	free_percpu(pool->stats);
	kfree(pool->name);
	kfree(pool);
}
