// SPDX-License-Identifier: GPL-2.0-only
/*
 * Pools of bounce buffers that stay mapped in the IOMMU
 *
 * If changing a mapping is expensive, copying a small buffer costs less than mapping and unmapping
 * it. With a virtual IOMMU, each change is a request to the host. Each DMA domain that bounces has
 * a pool. A pool has an allocator of slots (see dma-bounce-slots.c), and a provider that maps
 * memory in chunks. This file decides on the number of chunks. There are two providers: the host's
 * windows of virtio-iommu, and pages of the guest.
 *
 *  - When few slots are free, a work item adds a chunk. A mapping cannot add a chunk, because it
 *    may be made with interrupts off, and adding a chunk can sleep. A mapping that finds no slot is
 *    made the ordinary way, and requests more chunks. When the budget is used up, chunks that were
 *    idle for a while are cut again into slots of the size in demand.
 *  - Chunks that were idle for long are given back, unless few slots would have been free without
 *    them. So the pool's size follows the amount of DMA in flight. The last chunk of a kind and
 *    size stays longer, to serve the next burst.
 *  - When the budget is lowered below the memory in use, idle chunks are given back at once. Other
 *    chunks follow when their last slot returns. dma-bounce-share.c says how pools share memory.
 *  - When the last device leaves a domain, the domain loses its windows, and all chunks are dead.
 */

#define pr_fmt(fmt) "iommu: bounce: " fmt

#include <linux/cleanup.h>
#include <linux/device.h>
#include <linux/idr.h>
#include <linux/jiffies.h>
#include <linux/slab.h>

#include "dma-bounce-calibrate.h"
#include "dma-bounce-pages.h"
#include "dma-bounce-pool.h"
#include "dma-bounce-single.h"

#define CREATE_TRACE_POINTS
#include <trace/events/dma_bounce.h>

/* Maximum number of places at which the provider may fail before the pool retries later */
#define DMA_BOUNCE_PLACES	3
/* Time in jiffies between a failed attempt to add a chunk and the next attempt */
#define DMA_BOUNCE_RETRY	(HZ / 4)
/* Default time in ms after which an idle chunk is given back */
#define DMA_BOUNCE_IDLE_MS	10000
/* The last chunk of its kind and size is kept this many times as long. */
#define DMA_BOUNCE_KEEP_FACTOR	6

static_assert(DMA_BOUNCE_MIN_CHUNK >= DMA_BOUNCE_MAX_SLOT);

static DEFINE_IDA(dma_bounce_ida);
/* Allocated with the first pool, which may be made before any initcall of this code runs */
static struct workqueue_struct *dma_bounce_wq;
static DEFINE_MUTEX(dma_bounce_wq_lock);

static const int dma_bounce_prot[DMA_BOUNCE_KINDS] = {
	[DMA_BOUNCE_READ]	= IOMMU_READ,
	[DMA_BOUNCE_WRITE]	= IOMMU_WRITE,
	[DMA_BOUNCE_RW]		= IOMMU_READ | IOMMU_WRITE,
};

/**
 * dma_bounce_pool_missed - report that a mapping found no slot
 * @pool: the pool
 * @kind: access that the device needs
 * @class: log2 of the slot's size, minus DMA_BOUNCE_MIN_SHIFT
 *
 * Requests chunks, unless an attempt to add a chunk failed less than DMA_BOUNCE_RETRY ago.
 */
void dma_bounce_pool_missed(struct dma_bounce_pool *pool, enum dma_bounce_kind kind,
			    unsigned int class)
{
	atomic_inc(&pool->missed[kind][class]);
	if (time_after_eq(jiffies, READ_ONCE(pool->retry_at)))
		queue_work(dma_bounce_wq, &pool->work);
}

static void pool_notified(struct dma_bounce_slots *slots)
{
	queue_work(dma_bounce_wq, &container_of(slots, struct dma_bounce_pool, slots)->work);
}

/* Chunks. The caller of these functions holds the mutex. */

/* Gives memory back, but not the place. Returns false if a device may still reach the memory. */
bool dma_bounce_chunk_unmap(struct dma_bounce_pool *pool, struct dma_bounce_chunk *chunk)
{
	if (!chunk->va)
		return true;
	if (!pool->ops->del(pool->domain, chunk->iova, chunk->va, chunk->size)) {
		pool->stuck++;
		return false;
	}
	trace_dma_bounce_chunk(pool->name, chunk->iova, chunk->size, chunk->kind, false);
	chunk->va = NULL;
	pool->backed -= chunk->size;
	pool->nchunks--;
	pool->dels++;
	return true;
}

/**
 * dma_bounce_chunk_del - give back a withdrawn chunk, or a retired chunk without used slots
 * @pool: the pool of the chunk
 * @chunk: the chunk
 *
 * If the provider fails, the chunk keeps its place until a later attempt succeeds. No other chunk
 * may use the place as long as a device reaches the old chunk.
 */
void dma_bounce_chunk_del(struct dma_bounce_pool *pool, struct dma_bounce_chunk *chunk)
{
	if (dma_bounce_chunk_unmap(pool, chunk))
		dma_bounce_chunk_remove(&pool->slots, chunk);
	else
		dma_bounce_chunk_retire(&pool->slots, chunk, DMA_BOUNCE_DEAD);
}

/*
 * Asks the provider to add a chunk at a free place. At some places, the provider may always fail.
 * If the provider fails at a place, this function tries the next place. The next search starts
 * after the failed places.
 */
static void *chunk_back(struct dma_bounce_pool *pool, dma_addr_t *iova, size_t *size, int prot)
{
	unsigned long i, place, places = dma_bounce_slots_places(&pool->slots);
	unsigned int tried = 0;
	void *va = ERR_PTR(-ENOMEM);

	for (i = 0; i < places && tried < DMA_BOUNCE_PLACES; i++) {
		place = (pool->first_place + i) % places;
		if (dma_bounce_slots_chunk(&pool->slots, place))
			continue;
		*iova = pool->slots.base + ((dma_addr_t)place << pool->slots.chunk_shift);
		va = pool->ops->add(pool->domain, *iova, size, prot);
		if (!IS_ERR(va) || PTR_ERR(va) == -ENOMEM)
			break;
		tried++;
	}
	if (tried)
		pool->first_place = (pool->first_place + i) % places;
	return va;
}

/**
 * dma_bounce_chunk_make - add a chunk, which the caller publishes
 * @pool: the pool, whose mutex is held
 * @kind: access that devices have to the chunk
 * @class: class of the slots that the chunk may be cut into
 * @va: set to the memory of the chunk
 * @iova: set to the chunk's address for devices
 * @size: set to the chunk's length in bytes
 *
 * Blocks memory whose pages something holds, such as io_uring, and asks for other memory.
 *
 * Return: the chunk, or an error pointer. dma_bounce_chunk_del() gives the chunk back.
 */
struct dma_bounce_chunk *dma_bounce_chunk_make(struct dma_bounce_pool *pool, unsigned int kind,
					       unsigned int class, void **va, dma_addr_t *iova,
					       size_t *size)
{
	struct dma_bounce_chunk *chunk;

again:
	*size = 1UL << pool->slots.chunk_shift;
	if (pool->backed + *size > pool->budget)
		return ERR_PTR(-ENOMEM);
	chunk = dma_bounce_chunk_alloc(kind, class, *size, pool->node);
	if (!chunk)
		return ERR_PTR(-ENOMEM);
	*va = chunk_back(pool, iova, size, dma_bounce_prot[kind]);
	if (IS_ERR(*va)) {
		dma_bounce_chunk_discard(chunk);
		return ERR_CAST(*va);
	}
	pool->backed += *size;
	pool->peak = max(pool->peak, pool->backed);
	pool->nchunks++;
	pool->adds++;
	trace_dma_bounce_chunk(pool->name, *iova, *size, kind, true);
	queue_delayed_work(dma_bounce_wq, &pool->idle_work, msecs_to_jiffies(pool->idle_ms));
	if (unlikely(dma_bounce_memory_held(pool, *va, *size))) {
		dma_bounce_chunk_publish_whole(&pool->slots, chunk, *va, *iova, *size,
					       DMA_BOUNCE_BLOCKED);
		pool->blocked++;
		goto again;
	}
	return chunk;
}

static int chunk_add(struct dma_bounce_pool *pool, unsigned int kind, unsigned int class)
{
	struct dma_bounce_chunk *chunk;
	dma_addr_t iova;
	size_t size;
	void *va;

	chunk = dma_bounce_chunk_make(pool, kind, class, &va, &iova, &size);
	if (IS_ERR(chunk))
		return PTR_ERR(chunk);
	dma_bounce_chunk_publish(&pool->slots, chunk, va, iova, size);
	/* Ignore mappings that found no slot so far: the new chunk may be enough for them. */
	atomic_set(&pool->missed[kind][class], 0);
	return 0;
}

/**
 * dma_bounce_find_idle - withdraw an idle chunk
 * @pool: the pool
 * @kind: preferred kind
 * @age: minimum time for which the chunk has been idle, in jiffies
 *
 * Return: a chunk, or NULL if no chunk is idle for so long.
 */
struct dma_bounce_chunk *dma_bounce_find_idle(struct dma_bounce_pool *pool, unsigned int kind,
					      unsigned long age)
{
	struct dma_bounce_chunk *chunk;
	unsigned long place;

	/* Prefer a chunk of the same kind, because it need not be mapped again. */
	for (place = 0; (chunk = dma_bounce_next_chunk(pool, &place));)
		if (chunk->kind == kind &&
		    dma_bounce_chunk_withdraw(&pool->slots, chunk, age, false))
			return chunk;
	for (place = 0; (chunk = dma_bounce_next_chunk(pool, &place));)
		if (dma_bounce_chunk_withdraw(&pool->slots, chunk, age, false))
			return chunk;
	return NULL;
}

/* Cuts an idle chunk again, into slots of the size in demand. */
static int chunk_recycle(struct dma_bounce_pool *pool, unsigned int kind, unsigned int class)
{
	struct dma_bounce_chunk *old, *chunk;

	old = dma_bounce_find_idle(pool, kind, DMA_BOUNCE_IDLE);
	if (!old) {
		/* A chunk is not idle while CPUs keep its slots. Flush them for the next try. */
		dma_bounce_slots_flush(&pool->slots, true);
		return -ENOMEM;
	}
	pool->recycled++;
	chunk = old->kind == kind ?
		dma_bounce_chunk_alloc(kind, class, old->size, pool->node) : NULL;
	if (chunk) {
		dma_bounce_chunk_publish(&pool->slots, chunk, old->va, old->iova, old->size);
		dma_bounce_chunk_remove(&pool->slots, old);
		return 0;
	}
	dma_bounce_chunk_del(pool, old);
	return chunk_add(pool, kind, class);
}

/* Adds chunks for mappings that found no slot, at most one more than this kind and class has. */
static void pool_grow(struct dma_bounce_pool *pool, unsigned int kind, unsigned int class)
{
	unsigned int missed = atomic_xchg(&pool->missed[kind][class], 0);
	unsigned int per_chunk = dma_bounce_per_chunk(&pool->slots, class);
	unsigned int have = dma_bounce_chunks_of(pool, kind, class);
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
	/* If the pool is below its own limit, other pools can give up memory. */
	if (ret == -ENOMEM && pool->backed + (1UL << pool->slots.chunk_shift) <= pool->budget)
		pool->no_memory(pool);
}

/*
 * Adds a chunk if few slots are free, before they run out. Takes no memory from other sizes or
 * pools. Leaves the last chunk of the budget to mappings that find no slot. A failure does not
 * delay chunks for such mappings.
 */
static void pool_grow_ahead(struct dma_bounce_pool *pool, unsigned int kind, unsigned int class)
{
	if (xchg(&pool->slots.depots[kind][class].asks, false) &&
	    pool->backed + (2UL << pool->slots.chunk_shift) <= pool->budget &&
	    !chunk_add(pool, kind, class))
		pool->ahead++;
}

/**
 * dma_bounce_pool_reap - free retired chunks whose last slot has returned
 * @pool: the pool
 *
 * Retries chunks that could not be freed before. If the domain has no device, chunks of the
 * kernel's own pages stay until the next device is attached, because the IOMMU driver may just be
 * replaying their mappings for that device.
 */
void dma_bounce_pool_reap(struct dma_bounce_pool *pool)
{
	struct dma_bounce_chunk *chunk;
	unsigned long place;

	for (place = 0; (chunk = dma_bounce_next_chunk(pool, &place));) {
		if (dma_bounce_chunk_stays(pool, chunk))
			continue;
		if (chunk->va && !pool->active && pool->ops == &dma_bounce_page_ops)
			continue;
		if (chunk->state == DMA_BOUNCE_DRAINING) {
			pool->ndraining--;
			pool->drained++;
			/* Do not take the memory again at once: another user needs it. */
			WRITE_ONCE(pool->retry_at, jiffies + DMA_BOUNCE_RETRY);
		}
		dma_bounce_chunk_del(pool, chunk);
	}
}

/**
 * dma_bounce_pool_set_limits - set new limits, without removing chunks above the new budget
 * @pool: the pool
 * @limits: the provider's limits
 */
void dma_bounce_pool_set_limits(struct dma_bounce_pool *pool, struct dma_bounce_limits *limits)
{
	pool->budget = limits->budget;
	dma_bounce_set_thresholds(pool, &limits->threshold);
	WRITE_ONCE(pool->source, limits->source ?: pool);
}

/**
 * dma_bounce_pool_retry - let a pool that found no memory retry at once
 * @pool: the pool
 */
void dma_bounce_pool_retry(struct dma_bounce_pool *pool)
{
	WRITE_ONCE(pool->retry_at, jiffies);
	queue_work(dma_bounce_wq, &pool->work);
}

/* Makes the pool ready. This happens after the first mapping of the domain. */
static int pool_start(struct dma_bounce_pool *pool)
{
	struct dma_bounce_limits limits = {};
	int ret;

	ret = pool->ops->limits(pool->domain, &limits);
	if (ret)
		return ret;
	if (!is_power_of_2(limits.chunk_size) || limits.chunk_size < DMA_BOUNCE_MIN_CHUNK)
		return -EINVAL;
	dma_bounce_pool_set_limits(pool, &limits);
	ret = dma_bounce_slots_open(&pool->slots, limits.iova, limits.len,
				    ilog2(limits.chunk_size));
	if (!ret)
		pr_info("%s: device reads up to %u KiB and writes up to %u KiB through %s, at most %llu KiB of memory\n",
			pool->name, pool->threshold.read >> 10, pool->threshold.write >> 10,
			pool->ops->name, pool->budget >> 10);
	return ret;
}

static void pool_work(struct work_struct *work)
{
	struct dma_bounce_pool *pool = container_of(work, struct dma_bounce_pool, work);
	unsigned int kind, class;

	mutex_lock(&pool->slots.mutex);
	if (!pool->slots.len) {
		if (!pool->active || !READ_ONCE(pool->mask))
			goto out;
		if (pool_start(pool)) {
			pool->failures++;
			WRITE_ONCE(pool->retry_at, jiffies + DMA_BOUNCE_RETRY);
			goto out;
		}
	}
	dma_bounce_loans_reap(pool);
	dma_bounce_pool_reap(pool);
	if (!pool->active)
		goto out;
	/* CPUs keep at most half of the memory, so that the rest is always for DMA in flight. */
	dma_bounce_slots_limit(&pool->slots, pool->budget / 2);
	if (time_before(jiffies, READ_ONCE(pool->retry_at)))
		goto out;
	for (kind = 0; kind < DMA_BOUNCE_KINDS; kind++)
		for (class = 0; class < DMA_BOUNCE_CLASSES; class++)
			if (atomic_read(&pool->missed[kind][class]))
				pool_grow(pool, kind, class);
	for (kind = 0; kind < DMA_BOUNCE_KINDS; kind++)
		for (class = 0; class < DMA_BOUNCE_CLASSES; class++)
			pool_grow_ahead(pool, kind, class);
out:
	mutex_unlock(&pool->slots.mutex);
}

/**
 * dma_bounce_pool_set_idle - set the time after which an idle chunk is given back
 * @pool: the pool
 * @ms: the time in milliseconds, 1 to DMA_BOUNCE_MAX_IDLE_MS
 *
 * Also schedules the next check of the chunks after this time. The check that was scheduled before
 * may be a day away.
 */
void dma_bounce_pool_set_idle(struct dma_bounce_pool *pool, u32 ms)
{
	WRITE_ONCE(pool->idle_ms, ms);
	mod_delayed_work(dma_bounce_wq, &pool->idle_work, msecs_to_jiffies(ms));
}

/* Gives back chunks that have been idle for long. Repeats as long as the pool has chunks. */
static void pool_idle_work(struct work_struct *work)
{
	struct dma_bounce_pool *pool = container_of(to_delayed_work(work), struct dma_bounce_pool,
						    idle_work);
	unsigned long place, age = msecs_to_jiffies(READ_ONCE(pool->idle_ms));
	struct dma_bounce_chunk *chunk;
	bool last;

	mutex_lock(&pool->slots.mutex);
	if (!pool->slots.len)
		goto out;
	/* Do this also after the last device has left, to retry chunks that could not be freed. */
	dma_bounce_loans_reap(pool);
	dma_bounce_pool_reap(pool);
	if (!pool->active)
		goto again;
	dma_bounce_slots_flush(&pool->slots, false);
	for (place = 0; (chunk = dma_bounce_next_chunk(pool, &place));) {
		last = dma_bounce_chunks_of(pool, chunk->kind, chunk->class) <= 1;
		if (dma_bounce_chunk_withdraw(&pool->slots, chunk,
					      last ? age * DMA_BOUNCE_KEEP_FACTOR : age, !last)) {
			pool->shrunk++;
			dma_bounce_chunk_del(pool, chunk);
		}
	}
again:
	if (pool->nchunks || !list_empty(&pool->loans))
		queue_delayed_work(dma_bounce_wq, &pool->idle_work, max(age / 2, 1UL));
out:
	mutex_unlock(&pool->slots.mutex);
}

/**
 * dma_bounce_pool_first_use - start a pool when a device of its domain maps memory
 * @pool: a pool that is not ready yet
 * @mask: DMA mask of the device. A driver sets it after the domain was made, so the pool's IOVA is
 *	chosen only now.
 */
void dma_bounce_pool_first_use(struct dma_bounce_pool *pool, u64 mask)
{
	if (time_before(jiffies, READ_ONCE(pool->retry_at)))
		return;
	WRITE_ONCE(pool->mask, mask);
	queue_work(dma_bounce_wq, &pool->work);
}

/* Makes all chunks dead. Mapped slots become orphans. */
static void pool_kill(struct dma_bounce_pool *pool)
{
	struct dma_bounce_chunk *chunk;
	unsigned long place;

	if (!pool->slots.len)
		return;
	dma_bounce_loans_stop(pool);
	for (place = 0; (chunk = dma_bounce_next_chunk(pool, &place));)
		if (chunk->state != DMA_BOUNCE_WHOLE)
			dma_bounce_chunk_retire(&pool->slots, chunk, DMA_BOUNCE_DEAD);
	pool->ndraining = 0;
	dma_bounce_slots_flush(&pool->slots, true);
	/* Wait for users that copy to or from a slot. */
	synchronize_rcu();
	for (place = 0; (chunk = dma_bounce_next_chunk(pool, &place));)
		if (chunk->va && dma_bounce_chunk_unmap(pool, chunk))
			pool->orphaned += dma_bounce_chunk_used(&pool->slots, chunk);
	dma_bounce_pool_reap(pool);
}

/**
 * dma_bounce_pool_stop - give all chunks back before the last device leaves the domain
 * @pool: the pool of the domain
 *
 * May sleep.
 */
void dma_bounce_pool_stop(struct dma_bounce_pool *pool)
{
	mutex_lock(&pool->slots.mutex);
	pool->active = false;
	pool_kill(pool);
	mutex_unlock(&pool->slots.mutex);
}

/**
 * dma_bounce_pool_resume - use a pool again after a device was attached to a domain without devices
 * @pool: the pool of the domain
 *
 * Chunks are added when mappings need them.
 */
void dma_bounce_pool_resume(struct dma_bounce_pool *pool)
{
	mutex_lock(&pool->slots.mutex);
	pool->active = true;
	WRITE_ONCE(pool->retry_at, jiffies);
	mutex_unlock(&pool->slots.mutex);
}

static bool make_workqueue(void)
{
	guard(mutex)(&dma_bounce_wq_lock);
	if (!dma_bounce_wq)
		/* Freezable, because the IOMMU answers no requests while the system sleeps. */
		dma_bounce_wq = alloc_workqueue("dma_bounce", WQ_UNBOUND | WQ_FREEZABLE, 0);
	return dma_bounce_wq;
}

/**
 * dma_bounce_pool_create - make the pool of a domain
 * @domain: the domain
 * @iovad: IOVA allocator of the domain
 * @ops: provider of the pool's memory
 * @dev: first device of the domain
 * @threshold: thresholds of the boot option
 *
 * The pool takes no memory and no IOVA before the first mapping.
 *
 * Return: the pool, or NULL if there is not enough memory.
 */
struct dma_bounce_pool *dma_bounce_pool_create(struct iommu_domain *domain,
					       struct iova_domain *iovad,
					       const struct dma_bounce_ops *ops,
					       struct device *dev,
					       const struct dma_bounce_thresholds *threshold)
{
	struct dma_bounce_pool *pool;

	pool = make_workqueue() ? kzalloc(sizeof(*pool), GFP_KERNEL) : NULL;
	if (!pool)
		return NULL;
	pool->name = kstrdup(dev_name(dev), GFP_KERNEL);
	pool->stats = alloc_percpu(struct dma_bounce_stats);
	pool->id = ida_alloc(&dma_bounce_ida, GFP_KERNEL);
	if (!pool->name || !pool->stats || pool->id < 0)
		goto err_free;
	pool->node = dev_to_node(dev);
	pool->domain = domain;
	pool->iovad = iovad;
	pool->ops = ops;
	pool->threshold_option = *threshold;
	pool->active = true;
	pool->retry_at = jiffies;
	pool->idle_ms = DMA_BOUNCE_IDLE_MS;
	INIT_LIST_HEAD(&pool->loans);
	dma_bounce_slots_init(&pool->slots, pool_notified);
	xa_init_flags(&pool->single_use, XA_FLAGS_LOCK_IRQ);
	INIT_WORK(&pool->work, pool_work);
	INIT_DELAYED_WORK(&pool->idle_work, pool_idle_work);
	/* Larger mappings would not bounce. */
	domain->opt_mapping_size = 0;
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
 * dma_bounce_pool_destroy - free the pool of a domain without devices
 * @pool: the pool. Slots that are still mapped are lost.
 */
void dma_bounce_pool_destroy(struct dma_bounce_pool *pool)
{
	struct dma_bounce_chunk *chunk;
	unsigned long place;

	disable_work_sync(&pool->work);
	disable_delayed_work_sync(&pool->idle_work);

	mutex_lock(&pool->slots.mutex);
	pool->active = false;
	pool_kill(pool);
	dma_bounce_loans_forget(pool);
	for (place = 0; (chunk = dma_bounce_next_chunk(pool, &place));)
		dma_bounce_chunk_remove(&pool->slots, chunk);
	mutex_unlock(&pool->slots.mutex);
	dma_bounce_single_free_all(pool);

	dma_bounce_slots_close(&pool->slots);
	ida_free(&dma_bounce_ida, pool->id);
	free_percpu(pool->stats);
	kfree(pool->name);
	kfree(pool);
}
