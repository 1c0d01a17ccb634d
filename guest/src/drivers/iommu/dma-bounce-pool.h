/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Pool of a DMA domain: growing and shrinking. See the comment at the top of dma-bounce-pool.c.
 */
#ifndef _DMA_BOUNCE_POOL_H
#define _DMA_BOUNCE_POOL_H

#include "dma-bounce-types.h"

/* Maximum of idle_ms: a day. DMA_BOUNCE_KEEP_FACTOR days still fit in jiffies. */
#define DMA_BOUNCE_MAX_IDLE_MS	(24 * 60 * 60 * 1000)
/* Time in jiffies for which a chunk must have been idle before it is recycled */
#define DMA_BOUNCE_IDLE		HZ

struct dma_bounce_pool *dma_bounce_pool_create(struct iommu_domain *domain,
					       struct iova_domain *iovad,
					       const struct dma_bounce_ops *ops,
					       struct device *dev,
					       const struct dma_bounce_thresholds *threshold);
void dma_bounce_pool_destroy(struct dma_bounce_pool *pool);
void dma_bounce_pool_stop(struct dma_bounce_pool *pool);
void dma_bounce_pool_resume(struct dma_bounce_pool *pool);
void dma_bounce_pool_retry(struct dma_bounce_pool *pool);
void dma_bounce_pool_set_idle(struct dma_bounce_pool *pool, u32 ms);

/* Returns the number of live chunks that are cut into slots of a kind and class. */
static inline unsigned int dma_bounce_chunks_of(struct dma_bounce_pool *pool, unsigned int kind,
						unsigned int class)
{
	return pool->slots.depots[kind][class].nslots / dma_bounce_per_chunk(&pool->slots, class);
}

/* Returns true if something holds pages of memory that was lent before. */
static inline bool dma_bounce_memory_held(struct dma_bounce_pool *pool, void *va, size_t size)
{
	return pool->ops->held && pool->ops->held(pool->domain, va, size);
}

/* Returns true if a chunk is in use, so that its memory cannot be given back. */
static inline bool dma_bounce_chunk_stays(struct dma_bounce_pool *pool,
					  struct dma_bounce_chunk *chunk)
{
	switch (chunk->state) {
	case DMA_BOUNCE_LIVE:
	case DMA_BOUNCE_WHOLE:
		return true;
	case DMA_BOUNCE_BLOCKED:
		return dma_bounce_memory_held(pool, chunk->va, chunk->size);
	default:
		return dma_bounce_chunk_used(&pool->slots, chunk);
	}
}

/* The functions from here to dma_bounce_pool_set_limits() need the mutex of @pool. */
struct dma_bounce_chunk *dma_bounce_find_idle(struct dma_bounce_pool *pool, unsigned int kind,
					      unsigned long age);
struct dma_bounce_chunk *dma_bounce_chunk_make(struct dma_bounce_pool *pool, unsigned int kind,
					       unsigned int class, void **va, dma_addr_t *iova,
					       size_t *size);
bool dma_bounce_chunk_unmap(struct dma_bounce_pool *pool, struct dma_bounce_chunk *chunk);
void dma_bounce_chunk_del(struct dma_bounce_pool *pool, struct dma_bounce_chunk *chunk);
void dma_bounce_pool_reap(struct dma_bounce_pool *pool);
void dma_bounce_pool_set_limits(struct dma_bounce_pool *pool, struct dma_bounce_limits *limits);
void dma_bounce_pool_first_use(struct dma_bounce_pool *pool, u64 mask);
void dma_bounce_pool_missed(struct dma_bounce_pool *pool, enum dma_bounce_kind kind,
			    unsigned int class);

/**
 * dma_bounce_pool_get - take a free slot
 * @pool: a ready pool. The caller knows this from dma_bounce_owns() or pool->slots.len.
 * @kind: access that the device needs
 * @size: number of bytes needed, at most DMA_BOUNCE_MAX_SLOT
 * @mapped: type of mapping that the slot is for
 *
 * The caller is in an RCU read-side critical section until it no longer uses the slot's memory.
 *
 * Return: a slot whose size is the next power of two, or NULL if no slot is free. If NULL, the pool
 * may add a chunk soon.
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
 * dma_bounce_next_chunk - iterate over the chunks of a pool
 * @pool: the pool, whose mutex is held
 * @place: first place to look at. Set to the place after the returned chunk.
 *
 * Return: the first chunk at @place or after it, or NULL if there is no such chunk.
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
