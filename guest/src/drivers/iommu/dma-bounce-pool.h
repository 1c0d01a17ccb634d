/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * How many chunks the pool of a DMA domain has; see the comment at the top of dma-bounce-pool.c.
 */
#ifndef _DMA_BOUNCE_POOL_H
#define _DMA_BOUNCE_POOL_H

#include "dma-bounce-types.h"

/* The most that idle_ms can be: a day, a multiple of which does not overflow in jiffies */
#define DMA_BOUNCE_MAX_IDLE_MS	(24 * 60 * 60 * 1000)
/* How long a chunk must have been idle before it is used otherwise */
#define DMA_BOUNCE_IDLE		HZ

struct dma_bounce_pool *dma_bounce_pool_create(struct iommu_domain *domain,
					       struct iova_domain *iovad,
					       const struct dma_bounce_ops *ops,
					       struct device *dev, size_t threshold);
void dma_bounce_pool_destroy(struct dma_bounce_pool *pool);
void dma_bounce_pool_stop(struct dma_bounce_pool *pool);
void dma_bounce_pool_resume(struct dma_bounce_pool *pool);
void dma_bounce_pool_retry(struct dma_bounce_pool *pool);
void dma_bounce_pool_set_idle(struct dma_bounce_pool *pool, u32 ms);

/* To be called with the mutex of @pool held */
struct dma_bounce_chunk *dma_bounce_find_idle(struct dma_bounce_pool *pool, unsigned int kind,
					      unsigned long age);
struct dma_bounce_chunk *dma_bounce_chunk_make(struct dma_bounce_pool *pool, unsigned int kind,
					       unsigned int class, void **va, dma_addr_t *iova,
					       size_t *size);
void dma_bounce_chunk_del(struct dma_bounce_pool *pool, struct dma_bounce_chunk *chunk);
void dma_bounce_pool_reap(struct dma_bounce_pool *pool);
void dma_bounce_pool_set_limits(struct dma_bounce_pool *pool, struct dma_bounce_limits *limits);
void dma_bounce_pool_first_use(struct dma_bounce_pool *pool, u64 mask);
void dma_bounce_pool_missed(struct dma_bounce_pool *pool, enum dma_bounce_kind kind,
			    unsigned int class);

/**
 * dma_bounce_pool_get - take a free slot
 * @pool: a pool that is ready, as dma_bounce_owns() or pool->slots.len tells
 * @kind: what the device may do with it
 * @size: bytes needed, at most DMA_BOUNCE_MAX_SLOT
 * @mapped: what for
 *
 * The caller is in an RCU read-side critical section until it is done with the slot's memory.
 *
 * Return: a slot whose size is the next power of two, or NULL if there is none now; then there may
 * be soon.
 */
static inline struct dma_bounce_slot *dma_bounce_pool_get(struct dma_bounce_pool *pool,
							  enum dma_bounce_kind kind, size_t size,
							  enum dma_bounce_mapped mapped)
{
	unsigned int class = dma_bounce_class(size);
	struct dma_bounce_slot *slot = dma_bounce_slots_get(&pool->slots, kind, class, mapped);

	if (unlikely(!slot))
		dma_bounce_pool_missed(pool, kind, class);
	return slot;
}

/**
 * dma_bounce_next_chunk - look at chunks one by one
 * @pool: the pool, whose mutex is held
 * @place: where to look first; becomes the place behind what is returned
 *
 * Return: the first chunk at @place or behind it, or NULL if there is none.
 */
static inline struct dma_bounce_chunk *dma_bounce_next_chunk(struct dma_bounce_pool *pool,
							     unsigned long *place)
{
	struct dma_bounce_chunk *chunk;

	while (*place < dma_bounce_slots_places(&pool->slots)) {
		chunk = dma_bounce_slots_chunk(&pool->slots, (*place)++);
		if (chunk)
			return chunk;
	}
	return NULL;
}

#endif /* _DMA_BOUNCE_POOL_H */
