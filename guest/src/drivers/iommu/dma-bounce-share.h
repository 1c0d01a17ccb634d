/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Sharing of one provider's memory between the pools of several domains. See dma-bounce-share.c.
 */
#ifndef _DMA_BOUNCE_SHARE_H
#define _DMA_BOUNCE_SHARE_H

struct dma_bounce_pool;
struct shrink_control;
struct shrinker;

void dma_bounce_share_add(struct dma_bounce_pool *pool);
void dma_bounce_share_del(struct dma_bounce_pool *pool);

#if IS_ENABLED(CONFIG_KUNIT)
unsigned long dma_bounce_pages_scan(struct shrinker *shrinker, struct shrink_control *sc);
#endif

#endif /* _DMA_BOUNCE_SHARE_H */
