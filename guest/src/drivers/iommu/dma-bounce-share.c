// SPDX-License-Identifier: GPL-2.0-only
/*
 * Sharing of one provider's memory between the pools of several domains
 *
 * All domains of a provider share its memory. Windows share the host's budget. The kernel's own
 * pages share a part of the guest's memory.
 *
 * If the budget is lowered, idle chunks of any pool are given back first, then chunks of the pool
 * that has most chunks. If a pool finds no memory, another pool gives up a chunk that was idle for
 * a while. If no pool has an idle chunk, the pool with most chunks gives up a chunk, if it has at
 * least two more than the pool that needs memory.
 *
 * If the guest's memory runs short, pools of the kernel's own pages give idle chunks back at once.
 */

#include <kunit/visibility.h>
#include <linux/cleanup.h>
#include <linux/jiffies.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/shrinker.h>
#include <linux/workqueue.h>

#include "dma-bounce-debugfs.h"
#include "dma-bounce-pages.h"
#include "dma-bounce-pool.h"
#include "dma-bounce-share.h"

/* Time in jiffies to wait for a draining chunk before another chunk is taken */
#define DMA_BOUNCE_DRAIN	HZ

#define PAGES_PER_CHUNK		(DMA_BOUNCE_PAGE_CHUNK / PAGE_SIZE)

/* The pools of all domains. The mutex nests outside the mutexes of the pools. */
static LIST_HEAD(pools);
static DEFINE_MUTEX(pools_lock);

/* Retires the chunk with the fewest bytes in use. Returns false if there is no live chunk. */
static bool retire_one(struct dma_bounce_pool *pool)
{
	struct dma_bounce_chunk *chunk, *best = NULL;
	size_t used, least = SIZE_MAX;
	unsigned long place;

	for (place = 0; (chunk = dma_bounce_next_chunk(pool, &place));) {
		if (chunk->state != DMA_BOUNCE_LIVE)
			continue;
		used = dma_bounce_chunk_used(&pool->slots, chunk) *
		       dma_bounce_class_size(chunk->class);
		if (used < least) {
			least = used;
			best = chunk;
		}
	}
	if (!best)
		return false;
	dma_bounce_chunk_retire(&pool->slots, best, DMA_BOUNCE_DRAINING);
	pool->ndraining++;
	WRITE_ONCE(pool->retired_at, jiffies);
	return true;
}

/* Gives back at most @n chunks that were idle for @age jiffies. Returns their number. */
static unsigned int pool_give_idle(struct dma_bounce_pool *pool, unsigned int n, unsigned long age)
{
	struct dma_bounce_chunk *chunk;
	unsigned int given = 0;

	if (!n)
		return 0;
	dma_bounce_slots_flush(&pool->slots, true);
	while (given < n) {
		chunk = dma_bounce_find_idle(pool, DMA_BOUNCE_READ, age);
		if (!chunk)
			break;
		dma_bounce_chunk_del(pool, chunk);
		given++;
	}
	return given;
}

/* Gives back chunks above the budget: idle chunks at once, other chunks when they become idle. */
static void pool_trim(struct dma_bounce_pool *pool)
{
	u64 keep = pool->budget + ((u64)pool->ndraining << pool->slots.chunk_shift);
	unsigned int excess;

	if (pool->backed <= keep)
		return;
	excess = ((pool->backed - keep - 1) >> pool->slots.chunk_shift) + 1;
	excess -= pool_give_idle(pool, excess, 0);
	while (excess && retire_one(pool))
		excess--;
}

/* Flushes CPUs' stacks, and frees retired chunks whose last slots were kept there. */
static void pool_drain(struct dma_bounce_pool *pool)
{
	if (!pool->ndraining)
		return;
	dma_bounce_slots_flush(&pool->slots, true);
	dma_bounce_pool_reap(pool);
}

/*
 * Reads the provider's limits again, and applies them to the pool. Returns the number of chunks
 * that the provider wants back from all its pools together.
 */
static unsigned int read_limits(struct dma_bounce_pool *pool)
{
	struct dma_bounce_limits limits = {};

	guard(mutex)(&pool->slots.mutex);
	if (!pool->slots.len || !pool->active || pool->ops->limits(pool->domain, &limits))
		return 0;
	dma_bounce_pool_set_limits(pool, &limits);
	pool_trim(pool);
	pool_drain(pool);
	WRITE_ONCE(pool->retry_at, jiffies);
	return limits.surplus;
}

/* Like pool_give_idle(), but takes the pool's mutex */
static unsigned int give_idle(struct dma_bounce_pool *pool, unsigned int n, unsigned long age)
{
	guard(mutex)(&pool->slots.mutex);
	return pool->slots.len ? pool_give_idle(pool, n, age) : 0;
}

/* Retires a chunk, which is given back when it is idle. Returns false if there is no live chunk. */
static bool give_one(struct dma_bounce_pool *pool)
{
	guard(mutex)(&pool->slots.mutex);
	if (!pool->slots.len || !retire_one(pool))
		return false;
	pool_drain(pool);
	return true;
}

/*
 * Returns the number of chunks that a pool could give up. This excludes chunks that are lent, that
 * are draining, or that cannot be given back.
 */
static unsigned int live_chunks(struct dma_bounce_pool *pool)
{
	unsigned int kind, class;
	u64 bytes = 0;

	if (!smp_load_acquire(&pool->slots.len))	/* pairs with dma_bounce_slots_open() */
		return 0;
	for (kind = 0; kind < DMA_BOUNCE_KINDS; kind++)
		for (class = 0; class < DMA_BOUNCE_CLASSES; class++)
			bytes += (u64)READ_ONCE(pool->slots.depots[kind][class].nslots) *
				 dma_bounce_class_size(class);
	return DIV_ROUND_UP_ULL(bytes, 1UL << pool->slots.chunk_shift);
}

/* Returns true if a pool is draining a chunk that was retired less than DMA_BOUNCE_DRAIN ago. */
static bool gives_soon(struct dma_bounce_pool *pool)
{
	return READ_ONCE(pool->ndraining) &&
	       time_before(jiffies, READ_ONCE(pool->retired_at) + DMA_BOUNCE_DRAIN);
}

/* Returns the pool of @source with most live chunks, or NULL if no pool of @source has one. */
static struct dma_bounce_pool *largest_pool(const void *source)
{
	struct dma_bounce_pool *pool, *largest = NULL;

	list_for_each_entry(pool, &pools, list)
		if (READ_ONCE(pool->source) == source && live_chunks(pool) &&
		    (!largest || live_chunks(pool) > live_chunks(largest)))
			largest = pool;
	return largest;
}

/* Takes @surplus chunks back from the pools of @source. Draining chunks count as taken back. */
static void give_back(const void *source, unsigned int surplus)
{
	struct dma_bounce_pool *pool;

	list_for_each_entry(pool, &pools, list)
		if (READ_ONCE(pool->source) == source)
			surplus -= min(surplus, READ_ONCE(pool->ndraining));
	list_for_each_entry(pool, &pools, list)
		if (surplus && READ_ONCE(pool->source) == source)
			surplus -= give_idle(pool, surplus, 0);
	for (; surplus; surplus--) {
		pool = largest_pool(source);
		if (!pool || !give_one(pool))
			break;
	}
}

/* Takes a chunk of another pool for a pool without memory. Returns true if memory is free now. */
static bool find_memory(struct dma_bounce_pool *starved)
{
	const void *source = READ_ONCE(starved->source);
	struct dma_bounce_pool *pool;

	list_for_each_entry(pool, &pools, list) {
		if (pool == starved || READ_ONCE(pool->source) != source)
			continue;
		if (give_idle(pool, 1, DMA_BOUNCE_IDLE)) {
			pool->yielded++;
			return true;
		}
	}
	list_for_each_entry(pool, &pools, list)
		if (READ_ONCE(pool->source) == source && gives_soon(pool))
			return false;
	pool = largest_pool(source);
	if (!pool || pool == starved || live_chunks(pool) < live_chunks(starved) + 2)
		return false;
	if (!give_one(pool))
		return false;
	pool->yielded++;
	/* If the chunk is in use, the next mapping that finds no slot tries again. */
	return !READ_ONCE(pool->ndraining);
}

static void share_work(struct work_struct *work)
{
	struct dma_bounce_pool *pool;

	mutex_lock(&pools_lock);
	list_for_each_entry(pool, &pools, list)
		if (xchg(&pool->starved, false) && find_memory(pool))
			dma_bounce_pool_retry(pool);
	mutex_unlock(&pools_lock);
}

static DECLARE_WORK(dma_bounce_share_work, share_work);

/* Asks other pools for memory, for a pool that found no memory. The mutex of @pool is held. */
static void share_starved(struct dma_bounce_pool *pool)
{
	WRITE_ONCE(pool->starved, true);
	queue_work(system_freezable_wq, &dma_bounce_share_work);
}

/**
 * dma_bounce_share_add - add a new pool to the list of all pools
 * @pool: the pool
 */
void dma_bounce_share_add(struct dma_bounce_pool *pool)
{
	pool->no_memory = share_starved;
	mutex_lock(&pools_lock);
	list_add(&pool->list, &pools);
	dma_bounce_debugfs_add(pool);
	mutex_unlock(&pools_lock);
}

/**
 * dma_bounce_share_del - remove a pool from the list before it is destroyed
 * @pool: the pool
 */
void dma_bounce_share_del(struct dma_bounce_pool *pool)
{
	mutex_lock(&pools_lock);
	list_del(&pool->list);
	mutex_unlock(&pools_lock);
	dma_bounce_debugfs_del(pool);
}

/* Gives idle chunks of the kernel's own pages back. Returns the number of pages. */
static unsigned long give_pages(unsigned long wanted)
{
	struct dma_bounce_pool *pool;
	unsigned long given = 0;
	u64 before;

	list_for_each_entry(pool, &pools, list) {
		/* The allocation that needs memory may be one for this pool. */
		if (given >= wanted || pool->ops != &dma_bounce_page_ops ||
		    !mutex_trylock(&pool->slots.mutex))
			continue;
		before = pool->backed;
		if (pool->slots.len)
			pool_give_idle(pool, (wanted - given - 1) / PAGES_PER_CHUNK + 1, 0);
		given += (before - pool->backed) >> PAGE_SHIFT;
		mutex_unlock(&pool->slots.mutex);
	}
	return given;
}

static unsigned long pages_count(struct shrinker *shrinker, struct shrink_control *sc)
{
	return dma_bounce_page_bytes() >> PAGE_SHIFT ?: SHRINK_EMPTY;
}

VISIBLE_IF_KUNIT unsigned long dma_bounce_pages_scan(struct shrinker *shrinker,
						     struct shrink_control *sc)
{
	unsigned long given;

	/* The holder of this lock may need memory itself. */
	if (!mutex_trylock(&pools_lock))
		return SHRINK_STOP;
	given = give_pages(sc->nr_to_scan);
	mutex_unlock(&pools_lock);
	return given ?: SHRINK_STOP;
}

static int __init share_init(void)
{
	struct shrinker *shrinker = shrinker_alloc(0, "dma-bounce");

	if (!shrinker)
		return -ENOMEM;
	shrinker->count_objects = pages_count;
	shrinker->scan_objects = dma_bounce_pages_scan;
	shrinker->batch = PAGES_PER_CHUNK;
	shrinker_register(shrinker);
	return 0;
}
subsys_initcall(share_init);

/**
 * dma_bounce_limits_changed - apply changed limits of a provider
 * @ops: the provider
 *
 * May sleep.
 */
void dma_bounce_limits_changed(const struct dma_bounce_ops *ops)
{
	struct dma_bounce_pool *pool;

	mutex_lock(&pools_lock);
	list_for_each_entry(pool, &pools, list)
		if (pool->ops == ops)
			give_back(READ_ONCE(pool->source), read_limits(pool));
	mutex_unlock(&pools_lock);
}
EXPORT_SYMBOL_GPL(dma_bounce_limits_changed);
