/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Bounce memory from the kernel's own pages; see dma-bounce-pages.c.
 */
#ifndef _DMA_BOUNCE_PAGES_H
#define _DMA_BOUNCE_PAGES_H

#include <linux/atomic.h>
#include <linux/dma-bounce.h>
#include <linux/types.h>

extern const struct dma_bounce_ops dma_bounce_page_ops;

#if IS_ENABLED(CONFIG_KUNIT)
extern atomic_long_t dma_bounce_page_total;
u64 dma_bounce_page_limit(void);
#endif

#endif /* _DMA_BOUNCE_PAGES_H */
