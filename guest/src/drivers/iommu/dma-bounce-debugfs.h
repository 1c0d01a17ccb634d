/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Bounce pools in debugfs. See dma-bounce-debugfs.c.
 */
#ifndef _DMA_BOUNCE_DEBUGFS_H
#define _DMA_BOUNCE_DEBUGFS_H

#include "dma-bounce-types.h"

u64 dma_bounce_pool_stat(struct dma_bounce_pool *pool, enum dma_bounce_stat stat);
void dma_bounce_debugfs_add(struct dma_bounce_pool *pool);
void dma_bounce_debugfs_del(struct dma_bounce_pool *pool);

#endif /* _DMA_BOUNCE_DEBUGFS_H */
