// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bouncing of small DMA: why a mapping does not bounce
 *
 * This is what few mappings run through, kept out of the code of dma-bounce-take.h that all do.
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
 * dma_bounce_fallback - count and trace that something is not bounced
 * @pool: the pool of the device's domain
 * @dev: the device
 * @reason: why, one of DMA_BOUNCE_FB_*
 */
void dma_bounce_fallback(struct dma_bounce_pool *pool, struct device *dev,
			 enum dma_bounce_stat reason)
{
	dma_bounce_count(pool, reason, 1);
	trace_dma_bounce_fallback(dev, dma_bounce_reasons[reason]);
}

/**
 * dma_bounce_unusable - count and trace that a pool has no slots that a device can address
 * @pool: the pool of the device's domain, which is made ready if it was not
 * @dev: the device
 * @len: bytes of the pool's range, 0 if it is not ready
 * @mask: what the device can address
 */
void dma_bounce_unusable(struct dma_bounce_pool *pool, struct device *dev, u64 len, u64 mask)
{
	if (!len)
		dma_bounce_pool_first_use(pool, mask);
	dma_bounce_fallback(pool, dev, len ? DMA_BOUNCE_FB_MASK : DMA_BOUNCE_FB_STARTING);
}
