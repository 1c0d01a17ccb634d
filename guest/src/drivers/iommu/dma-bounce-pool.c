// SPDX-License-Identifier: GPL-2.0-only
/*
 * Pools of bounce buffers that stay mapped in the IOMMU
 *
 * Where changing a mapping is dear (each change is a request to the host, in a guest with a virtual
 * IOMMU), copying a small buffer costs less than mapping and unmapping it. Each DMA domain that
 * bounces has a pool: an allocator of slots (see dma-bounce-slots.c), a provider that maps memory
 * for it in chunks, and what is here, which decides how many chunks there are. Host-owned windows
 * of virtio-iommu and pages of the guest are the two providers.
 *
 *  - When few slots are left, a work item adds a chunk (mappings come with interrupts off, adding a
 *    chunk can sleep). A mapping that finds none all the same goes the ordinary way, and has more
 *    added. At the budget's end, chunks that nobody has used for a while are cut anew for the size
 *    in demand.
 *  - Chunks that have been idle for long are given back, unless few slots would have been left
 *    without them; so memory in use follows the DMA in flight. The last chunk of a kind and size
 *    stays longer, to serve the next burst.
 *  - When the budget is lowered below what is there, idle chunks are given back at once and others
 *    as soon as the last slot in use has come back. How pools share what one provider gives is in
 *    dma-bounce-share.c.
 *  - When the last device leaves the domain, its windows end: all chunks are dead then.
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

/* How many places are tried for a chunk where the provider fails, before it is tried again later */
#define DMA_BOUNCE_PLACES	3
/* How long to wait before a failed attempt to add a chunk is repeated */
#define DMA_BOUNCE_RETRY	(HZ / 4)
/* How long a chunk must have been idle before it is given back */
#define DMA_BOUNCE_IDLE_MS	10000
/* How many times longer the last one of its kind and size is kept */
#define DMA_BOUNCE_KEEP_FACTOR	6

static_assert(DMA_BOUNCE_MIN_CHUNK >= DMA_BOUNCE_MAX_SLOT);

static DEFINE_IDA(dma_bounce_ida);
/* Made with the first pool, which may be before initcalls that could make it */
static struct workqueue_struct *dma_bounce_wq;
static DEFINE_MUTEX(dma_bounce_wq_lock);

static const int dma_bounce_prot[DMA_BOUNCE_KINDS] = {
	[DMA_BOUNCE_READ]	= IOMMU_READ,
	[DMA_BOUNCE_WRITE]	= IOMMU_WRITE,
	[DMA_BOUNCE_RW]		= IOMMU_READ | IOMMU_WRITE,
};

/**
 * dma_bounce_pool_missed - a mapping found no slot
 * @pool: the pool
 * @kind: what the device was to do with it
 * @class: log2 of the slot's size, less DMA_BOUNCE_MIN_SHIFT
 *
 * Has chunks added, unless that failed just now.
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
	struct dma_bounce_pool *pool = container_of(slots, struct dma_bounce_pool, slots);

	queue_work(dma_bounce_wq, &pool->work);
}

/* Chunks. All of this runs under the mutex. */

static unsigned int chunks_of(struct dma_bounce_pool *pool, unsigned int kind, unsigned int class)
{
	return pool->slots.depots[kind][class].nslots / dma_bounce_per_chunk(&pool->slots, class);
}

/* Gives the memory of a chunk back; false if a device may still reach it. */
static bool chunk_unmap(struct dma_bounce_pool *pool, struct dma_bounce_chunk *chunk)
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
 * dma_bounce_chunk_del - give back a chunk that was withdrawn, or retired and then unused
 * @pool: its pool
 * @chunk: the chunk
 *
 * If that fails it keeps its place, where nothing else may be as long as a device reaches it, until
 * it is tried again.
 */
void dma_bounce_chunk_del(struct dma_bounce_pool *pool, struct dma_bounce_chunk *chunk)
{
	if (chunk_unmap(pool, chunk))
		dma_bounce_chunk_remove(&pool->slots, chunk);
	else
		dma_bounce_chunk_retire(&pool->slots, chunk, DMA_BOUNCE_DEAD);
}

/*
 * Has the provider add a chunk at a free place. A place may be one where it always fails: the next
 * is tried then, and the search starts behind it the next time.
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
 * dma_bounce_chunk_make - have the provider add a chunk, to be published
 * @pool: the pool, whose mutex is held
 * @kind: what devices may do with it
 * @class: the slots that it may be cut into
 * @va: becomes its memory
 * @iova: becomes the place where devices see it
 * @size: becomes its bytes
 *
 * Return: the chunk, to be given back by dma_bounce_chunk_del(), or an error pointer.
 */
struct dma_bounce_chunk *dma_bounce_chunk_make(struct dma_bounce_pool *pool, unsigned int kind,
					       unsigned int class, void **va, dma_addr_t *iova,
					       size_t *size)
{
	struct dma_bounce_chunk *chunk;

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
	/* Mappings that found no slot meanwhile did not see this one. */
	atomic_set(&pool->missed[kind][class], 0);
	return 0;
}

/**
 * dma_bounce_find_idle - withdraw an idle chunk
 * @pool: the pool
 * @kind: preferably one of this kind
 * @age: it has been idle for this many jiffies
 *
 * Return: a chunk, or NULL if there is none.
 */
struct dma_bounce_chunk *dma_bounce_find_idle(struct dma_bounce_pool *pool, unsigned int kind,
					      unsigned long age)
{
	struct dma_bounce_chunk *chunk;
	unsigned long place;

	/* One of the same kind needs no request: look for that first. */
	for (place = 0; (chunk = dma_bounce_next_chunk(pool, &place));)
		if (chunk->kind == kind &&
		    dma_bounce_chunk_withdraw(&pool->slots, chunk, age, false))
			return chunk;
	for (place = 0; (chunk = dma_bounce_next_chunk(pool, &place));)
		if (dma_bounce_chunk_withdraw(&pool->slots, chunk, age, false))
			return chunk;
	return NULL;
}

/* Cuts an idle chunk anew, for slots that are in demand. */
static int chunk_recycle(struct dma_bounce_pool *pool, unsigned int kind, unsigned int class)
{
	struct dma_bounce_chunk *old, *chunk;

	old = dma_bounce_find_idle(pool, kind, DMA_BOUNCE_IDLE);
	if (!old) {
		/* Slots in CPUs' caches hide idle chunks; they show next time. */
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

/* Makes room for mappings that found no slot, at most doubling what there is. */
static void pool_grow(struct dma_bounce_pool *pool, unsigned int kind, unsigned int class)
{
	unsigned int missed = atomic_xchg(&pool->missed[kind][class], 0);
	unsigned int per_chunk = dma_bounce_per_chunk(&pool->slots, class);
	unsigned int have = chunks_of(pool, kind, class);
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
	/* Others can help where it is not its own limit that it is at. */
	if (ret == -ENOMEM && pool->backed + (1UL << pool->slots.chunk_shift) <= pool->budget)
		pool->no_memory(pool);
}

/*
 * Adds a chunk where few slots are left, before mappings find none. For that alone nothing is taken
 * from others, the budget's last chunk is left to mappings that found none, and a failure does not
 * put off what these need.
 */
static void pool_grow_ahead(struct dma_bounce_pool *pool, unsigned int kind, unsigned int class)
{
	if (xchg(&pool->slots.depots[kind][class].asks, false) &&
	    pool->backed + (2UL << pool->slots.chunk_shift) <= pool->budget &&
	    !chunk_add(pool, kind, class))
		pool->ahead++;
}

/**
 * dma_bounce_pool_reap - free retired chunks whose last slot has come back
 * @pool: the pool
 *
 * Those that could not be freed before too. But without a device, mappings of pages wait for the
 * next one: it may be having them replayed.
 */
void dma_bounce_pool_reap(struct dma_bounce_pool *pool)
{
	struct dma_bounce_chunk *chunk;
	unsigned long place;

	for (place = 0; (chunk = dma_bounce_next_chunk(pool, &place));) {
		if (chunk->state == DMA_BOUNCE_LIVE || chunk->state == DMA_BOUNCE_WHOLE ||
		    dma_bounce_chunk_used(&pool->slots, chunk))
			continue;
		if (chunk->va && !pool->active && pool->ops == &dma_bounce_page_ops)
			continue;
		if (chunk->state == DMA_BOUNCE_DRAINING) {
			pool->ndraining--;
			pool->drained++;
			/* It was wanted elsewhere: this pool is not the first to take it again. */
			WRITE_ONCE(pool->retry_at, jiffies + DMA_BOUNCE_RETRY);
		}
		dma_bounce_chunk_del(pool, chunk);
	}
}

/**
 * dma_bounce_pool_set_limits - keep to what the provider says, but for what there is already
 * @pool: the pool
 * @limits: what it says
 */
void dma_bounce_pool_set_limits(struct dma_bounce_pool *pool, struct dma_bounce_limits *limits)
{
	size_t threshold = pool->threshold_option ?: limits->threshold;

	pool->budget = limits->budget;
	if (!threshold) {
		if (!pool->calibrated)
			pool->calibrated = dma_bounce_calibrate(pool);
		threshold = pool->calibrated;
	}
	threshold = min_not_zero(threshold, (size_t)DMA_BOUNCE_MAX_SLOT);
	WRITE_ONCE(pool->threshold, threshold);
	WRITE_ONCE(pool->source, limits->source ?: pool);
}

/**
 * dma_bounce_pool_retry - there may be memory for a pool that found none
 * @pool: the pool
 */
void dma_bounce_pool_retry(struct dma_bounce_pool *pool)
{
	WRITE_ONCE(pool->retry_at, jiffies);
	queue_work(dma_bounce_wq, &pool->work);
}

/* Makes the pool ready to be used: it is the first mapping that brings us here. */
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
		pr_info("%s: up to %zu KiB through %s, at most %llu KiB of memory\n", pool->name,
			pool->threshold >> 10, pool->ops->name, pool->budget >> 10);
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
	/* Half of the memory is for what is in flight, however many CPUs there are. */
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
 * dma_bounce_pool_set_idle - set how long a chunk must have been idle to be given back
 * @pool: the pool
 * @ms: the time in milliseconds, 1 to DMA_BOUNCE_MAX_IDLE_MS
 *
 * The next look at the chunks is after this time: the one that was due by the time before may be a
 * day away.
 */
void dma_bounce_pool_set_idle(struct dma_bounce_pool *pool, u32 ms)
{
	WRITE_ONCE(pool->idle_ms, ms);
	mod_delayed_work(dma_bounce_wq, &pool->idle_work, msecs_to_jiffies(ms));
}

/* Gives back chunks that have been idle for long, and goes on as long as there are any chunks. */
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
	/* After the last device has left too: what could not be given back then is tried again. */
	dma_bounce_loans_reap(pool);
	dma_bounce_pool_reap(pool);
	if (!pool->active)
		goto again;
	dma_bounce_slots_flush(&pool->slots, false);
	for (place = 0; (chunk = dma_bounce_next_chunk(pool, &place));) {
		last = chunks_of(pool, chunk->kind, chunk->class) <= 1;
		if (dma_bounce_chunk_withdraw(&pool->slots, chunk,
					      last ? age * DMA_BOUNCE_KEEP_FACTOR : age, !last)) {
			pool->shrunk++;
			dma_bounce_chunk_del(pool, chunk);
		}
	}
again:
	if (pool->nchunks)
		queue_delayed_work(dma_bounce_wq, &pool->idle_work, max(age / 2, 1UL));
out:
	mutex_unlock(&pool->slots.mutex);
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
	queue_work(dma_bounce_wq, &pool->work);
}

/* Ends all chunks. Slots that are mapped become orphans. */
static void pool_kill(struct dma_bounce_pool *pool)
{
	struct dma_bounce_chunk *chunk;
	unsigned long place;

	if (!pool->slots.len)
		return;
	dma_bounce_loans_stop(pool);
	for (place = 0; (chunk = dma_bounce_next_chunk(pool, &place));)
		dma_bounce_chunk_retire(&pool->slots, chunk, DMA_BOUNCE_DEAD);
	pool->ndraining = 0;
	dma_bounce_slots_flush(&pool->slots, true);
	/* Whoever is copying to or from a slot finishes. */
	synchronize_rcu();
	for (place = 0; (chunk = dma_bounce_next_chunk(pool, &place));) {
		if (chunk->va && chunk_unmap(pool, chunk))
			pool->orphaned += dma_bounce_chunk_used(&pool->slots, chunk);
	}
	dma_bounce_pool_reap(pool);
}

/**
 * dma_bounce_pool_stop - the last device is about to leave the domain
 * @pool: its pool
 *
 * Gives all chunks back. May sleep.
 */
void dma_bounce_pool_stop(struct dma_bounce_pool *pool)
{
	mutex_lock(&pool->slots.mutex);
	pool->active = false;
	pool_kill(pool);
	mutex_unlock(&pool->slots.mutex);
}

/**
 * dma_bounce_pool_resume - a device was attached to a domain that had none
 * @pool: its pool
 *
 * Chunks are added as mappings need them.
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
		/* Freezable: while the system sleeps, the IOMMU does not answer requests. */
		dma_bounce_wq = alloc_workqueue("dma_bounce", WQ_UNBOUND | WQ_FREEZABLE, 0);
	return dma_bounce_wq;
}

/**
 * dma_bounce_pool_create - make the pool of a domain
 * @domain: the domain
 * @iovad: its IOVA allocator
 * @ops: where its memory comes from
 * @dev: the first device
 * @threshold: bytes that the boot option says, or 0
 *
 * The pool takes memory and IOVA only when something is mapped.
 *
 * Return: the pool, or NULL if there is not enough memory.
 */
struct dma_bounce_pool *dma_bounce_pool_create(struct iommu_domain *domain,
					       struct iova_domain *iovad,
					       const struct dma_bounce_ops *ops,
					       struct device *dev, size_t threshold)
{
	struct dma_bounce_pool *pool;

	if (!make_workqueue())
		return NULL;
	pool = kzalloc(sizeof(*pool), GFP_KERNEL);
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
	pool->threshold_option = threshold;
	pool->active = true;
	pool->retry_at = jiffies;
	pool->idle_ms = DMA_BOUNCE_IDLE_MS;
	INIT_LIST_HEAD(&pool->loans);
	dma_bounce_slots_init(&pool->slots, pool_notified);
	xa_init_flags(&pool->single_use, XA_FLAGS_LOCK_IRQ);
	INIT_WORK(&pool->work, pool_work);
	INIT_DELAYED_WORK(&pool->idle_work, pool_idle_work);
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

	disable_work_sync(&pool->work);
	disable_delayed_work_sync(&pool->idle_work);

	mutex_lock(&pool->slots.mutex);
	pool->active = false;
	pool_kill(pool);
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
