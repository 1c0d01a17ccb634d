/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Bounce memory from the kernel's own pages. See dma-bounce-pages.c.
 */
#ifndef _DMA_BOUNCE_PAGES_H
#define _DMA_BOUNCE_PAGES_H

#include <linux/atomic.h>
#include <linux/dma-bounce.h>
#include <linux/sizes.h>
#include <linux/types.h>

/* Chunk size in bytes, and maximum for iommu.bounce=pages= */
#define DMA_BOUNCE_PAGE_CHUNK		SZ_2M
#define DMA_BOUNCE_MAX_PAGE_POOL	SZ_1G

extern const struct dma_bounce_ops dma_bounce_page_ops;
extern size_t dma_bounce_page_pool_size;

size_t dma_bounce_page_bytes(void);

#if IS_ENABLED(CONFIG_KUNIT)
extern atomic_long_t dma_bounce_page_total;
u64 dma_bounce_page_limit(void);
struct iova *dma_bounce_page_range(struct iommu_domain *domain, size_t size);
#endif

#endif /* _DMA_BOUNCE_PAGES_H */
