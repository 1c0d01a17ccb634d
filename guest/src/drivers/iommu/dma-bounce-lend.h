/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Bounce memory lent to applications. See the comment at the top of dma-bounce-lend.c.
 */
#ifndef _DMA_BOUNCE_LEND_H
#define _DMA_BOUNCE_LEND_H

#include <linux/dma-mapping.h>
#include <linux/jump_label.h>
#include <linux/memremap.h>

#include "dma-bounce-types.h"

void dma_bounce_lender_set(struct device *dev, struct dma_bounce_pool *pool);
void dma_bounce_lender_del(struct device *dev);
void dma_bounce_lend_end(struct dma_bounce_pool *pool);
struct dma_bounce_chunk *dma_bounce_chunk_lend(struct dma_bounce_pool *pool);
dma_addr_t dma_bounce_lent_map(struct dma_bounce_pool *pool, phys_addr_t phys, size_t size);

DECLARE_STATIC_KEY_FALSE(dma_bounce_lend_key);

/* Returns true if memory may be lent. */
static inline bool dma_bounce_lends(void)
{
	return static_branch_unlikely(&dma_bounce_lend_key);
}

/* Returns true if a page belongs to memory that can be lent, for any device. */
static inline bool dma_bounce_is_lent(const struct page *page)
{
	return dma_bounce_lends() && is_zone_device_page(page) &&
	       page_pgmap(page)->owner == DMA_BOUNCE_LEND_OWNER;
}

/*
 * Returns true if a page is lent at present, for any device. If memory was taken back while
 * something holds its pages, no device may access it.
 */
static inline bool dma_bounce_is_on_loan(const struct page *page)
{
	return dma_bounce_is_lent(page) &&
	       READ_ONCE(folio_page(page_folio(page), 0)->zone_device_data);
}

#endif /* _DMA_BOUNCE_LEND_H */
