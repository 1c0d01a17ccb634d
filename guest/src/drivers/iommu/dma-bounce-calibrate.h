/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Measurement of the size at which bouncing and mapping cost the same. See dma-bounce-calibrate.c.
 */
#ifndef _DMA_BOUNCE_CALIBRATE_H
#define _DMA_BOUNCE_CALIBRATE_H

#include <linux/types.h>

struct dma_bounce_pool;
struct dma_bounce_thresholds;

void dma_bounce_calibrate(struct dma_bounce_pool *pool);
void dma_bounce_set_thresholds(struct dma_bounce_pool *pool,
			       const struct dma_bounce_thresholds *advice);

#endif /* _DMA_BOUNCE_CALIBRATE_H */
