// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bouncing of small DMA: mappings that do not bounce
 *
 * Few mappings run through this code, so it is not inline like the code of dma-bounce-take.h.
 */

#include <linux/device.h>

#include <trace/events/dma_bounce.h>

#include "dma-bounce-take.h"

static const char * const dma_bounce_reasons[DMA_BOUNCE_STATS] = {
	[DMA_BOUNCE_FB_STARTING]	= "starting",
	[DMA_BOUNCE_FB_FULL]		= "full",
	[DMA_BOUNCE_FB_SIZE]		= "size",
	[DMA_BOUNCE_FB_LAYOUT]		= "layout",
	[DMA_BOUNCE_FB_MASK]		= "mask",
	[DMA_BOUNCE_FB_ATTRS]		= "attrs",
	[DMA_BOUNCE_FB_MEMORY]		= "memory",
};

/**
 * dma_bounce_fallback - count and trace a mapping that does not bounce
 * @pool: the pool of the device's domain
 * @dev: the device
 * @reason: the reason, one of DMA_BOUNCE_FB_*
 */
void dma_bounce_fallback(struct dma_bounce_pool *pool, struct device *dev,
			 enum dma_bounce_stat reason)
{
	dma_bounce_count(pool, reason, 1);
	trace_dma_bounce_fallback(dev, dma_bounce_reasons[reason]);
}

/**
 * dma_bounce_unusable - count and trace a mapping whose pool is not ready or not addressable
 * @pool: the pool of the device's domain. If it is not ready, it is started.
 * @dev: the device
 * @len: length of the pool's range in bytes, 0 if the pool is not ready
 * @mask: DMA mask of the device
 */
void dma_bounce_unusable(struct dma_bounce_pool *pool, struct device *dev, u64 len, u64 mask)
{
	if (!len)
		dma_bounce_pool_first_use(pool, mask);
	dma_bounce_fallback(pool, dev, len ? DMA_BOUNCE_FB_MASK : DMA_BOUNCE_FB_STARTING);
}
