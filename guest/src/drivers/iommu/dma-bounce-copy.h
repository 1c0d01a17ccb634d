/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Copies between buffers and slots. See the comment at the top of dma-bounce-copy.c.
 */
#ifndef _DMA_BOUNCE_COPY_H
#define _DMA_BOUNCE_COPY_H

#include <linux/dma-direction.h>
#include <linux/dma-mapping.h>
#include <linux/tracepoint-defs.h>

#include "dma-bounce-types.h"

DECLARE_TRACEPOINT(dma_bounce_map);
DECLARE_TRACEPOINT(dma_bounce_unmap);

void dma_bounce_copy(void *buffer, phys_addr_t phys, size_t len, bool to_buffer);

void __dma_bounce_slot_fill(struct dma_bounce_pool *pool, struct device *dev,
			    struct dma_bounce_slot *slot);
void dma_bounce_slot_trace(struct device *dev, struct dma_bounce_slot *slot);
void dma_bounce_slot_trace_end(struct device *dev, struct dma_bounce_slot *slot, bool copy);
void dma_bounce_slot_copy(struct dma_bounce_pool *pool, struct dma_bounce_slot *slot,
			  struct scatterlist *sgl, size_t skip, size_t len, bool to_slot);
void dma_bounce_slot_lost(struct dma_bounce_pool *pool, struct device *dev);
void dma_bounce_slot_sync(struct dma_bounce_pool *pool, struct device *dev,
			  struct dma_bounce_slot *slot, struct scatterlist *sgl, size_t skip,
			  size_t len, enum dma_data_direction dir, bool for_device);

/**
 * dma_bounce_slot_fill - copy a buffer to its slot at map, if required
 * @pool: the pool of the slot
 * @dev: the device that maps
 * @slot: a slot that describes its mapping
 * @dir: direction of the transfer
 * @attrs: attributes of the mapping
 */
static inline void dma_bounce_slot_fill(struct dma_bounce_pool *pool, struct device *dev,
					struct dma_bounce_slot *slot, enum dma_data_direction dir,
					unsigned long attrs)
{
	slot->no_copy_in = dir == DMA_FROM_DEVICE && (attrs & DMA_ATTR_BOUNCE_NO_COPY_IN) &&
			   !dma_bounce_untrusted(dev);
	if (!slot->no_copy_in)
		__dma_bounce_slot_fill(pool, dev, slot);
	if (tracepoint_enabled(dma_bounce_map))
		dma_bounce_slot_trace(dev, slot);
}

/**
 * dma_bounce_slot_finish - copy the slot back at unmap, if required, and free the slot
 * @pool: the pool of the slot
 * @dev: the device that unmaps
 * @slot: a slot that serves a mapping
 * @sgl: the list that is unmapped, or NULL if the mapping is not a list
 * @attrs: attributes of the unmapping
 */
static __always_inline void dma_bounce_slot_finish(struct dma_bounce_pool *pool, struct device *dev,
						   struct dma_bounce_slot *slot,
						   struct scatterlist *sgl, unsigned long attrs)
{
	bool copy = slot->chunk->kind != DMA_BOUNCE_READ;

	if (copy && slot->no_copy_in) {
		/* Such a mapping is never synchronised, so DMA_ATTR_SKIP_CPU_SYNC means nothing. */
		if (!(attrs & DMA_ATTR_BOUNCE_ALL_WRITTEN)) {
			dma_bounce_count(pool, DMA_BOUNCE_UNWRITTEN, 1);
			copy = false;
		}
	} else if (attrs & DMA_ATTR_SKIP_CPU_SYNC) {
		copy = false;
	}
	if (copy && unlikely(READ_ONCE(slot->chunk->state) == DMA_BOUNCE_DEAD)) {
		dma_bounce_slot_lost(pool, dev);
		copy = false;
	}
	if (copy)
		dma_bounce_slot_copy(pool, slot, sgl, 0, slot->len, false);
	if (tracepoint_enabled(dma_bounce_unmap))
		dma_bounce_slot_trace_end(dev, slot, copy);
	dma_bounce_slots_put(&pool->slots, slot);
}

#endif /* _DMA_BOUNCE_COPY_H */
