/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Bounce buffers for one mapping each. See dma-bounce-single.c.
 */
#ifndef _DMA_BOUNCE_SINGLE_H
#define _DMA_BOUNCE_SINGLE_H

#include <linux/dma-direction.h>
#include <linux/types.h>

struct dma_bounce_pool;

dma_addr_t dma_bounce_single_map(struct dma_bounce_pool *pool, u64 mask, phys_addr_t phys,
				 size_t size, enum dma_data_direction dir, unsigned long attrs);
bool dma_bounce_single_unmap(struct dma_bounce_pool *pool, dma_addr_t addr, unsigned long attrs);
bool dma_bounce_single_sync(struct dma_bounce_pool *pool, dma_addr_t addr, size_t size,
			    enum dma_data_direction dir, bool for_device);
void dma_bounce_single_free_all(struct dma_bounce_pool *pool);

#endif /* _DMA_BOUNCE_SINGLE_H */
