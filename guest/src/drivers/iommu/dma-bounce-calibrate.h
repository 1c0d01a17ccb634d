/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Measurement of the size at which bouncing and mapping cost the same. See dma-bounce-calibrate.c.
 */
#ifndef _DMA_BOUNCE_CALIBRATE_H
#define _DMA_BOUNCE_CALIBRATE_H

#include <linux/types.h>

struct dma_bounce_pool;

size_t dma_bounce_calibrate(struct dma_bounce_pool *pool);

#endif /* _DMA_BOUNCE_CALIBRATE_H */
