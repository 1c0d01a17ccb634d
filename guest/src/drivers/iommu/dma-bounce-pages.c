// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bounce memory from the kernel's own pages, for any IOMMU. A chunk's pages are allocated and
 * mapped when the chunk is added.
 */

#define pr_fmt(fmt) "iommu: bounce: " fmt

#include <kunit/visibility.h>
#include <linux/atomic.h>
#include <linux/dma-mapping.h>
#include <linux/gfp.h>
#include <linux/iova.h>
#include <linux/mm.h>

#include "dma-bounce-pages.h"
#include "dma-bounce-types.h"

/* All domains' pools together take at most the system's memory / PAGE_POOL_MEMORY_PART. */
#define PAGE_POOL_MEMORY_PART	8

#define DEFAULT_PAGE_POOL	SZ_64M

/* Maximum bytes of one domain's pool, and size of the IOVA range of the pool */
size_t dma_bounce_page_pool_size __ro_after_init = DEFAULT_PAGE_POOL;

/* Bytes in the pools of all domains */
VISIBLE_IF_KUNIT atomic_long_t dma_bounce_page_total = ATOMIC_LONG_INIT(0);

VISIBLE_IF_KUNIT u64 dma_bounce_page_limit(void)
{
	return ((u64)totalram_pages() << PAGE_SHIFT) / PAGE_POOL_MEMORY_PART;
}

/* Allocates an IOVA range of @size bytes, aligned to its size. */
static struct iova *take_range(struct iommu_domain *domain, size_t size)
{
	struct iova_domain *iovad = domain->bounce->iovad;
	unsigned long shift = iova_shift(iovad);
	u64 last = READ_ONCE(domain->bounce->mask);
	struct iova *iova = NULL;

	if (domain->geometry.force_aperture)
		last = min_t(u64, last, domain->geometry.aperture_end);
	/* Other devices of the domain may have smaller masks: prefer IOVA below 4 GiB. */
	if (last > DMA_BIT_MASK(32))
		iova = alloc_iova(iovad, size >> shift, DMA_BIT_MASK(32) >> shift, true);
	return iova ?: alloc_iova(iovad, size >> shift, last >> shift, true);
}

/* Allocates IOVA for a pool of @size bytes. If there is no such range, uses the default size. */
VISIBLE_IF_KUNIT struct iova *dma_bounce_page_range(struct iommu_domain *domain, size_t size)
{
	struct iova *range = take_range(domain, size);

	return range || size <= DEFAULT_PAGE_POOL ? range : take_range(domain, DEFAULT_PAGE_POOL);
}

static int page_limits(struct iommu_domain *domain, struct dma_bounce_limits *limits)
{
	struct dma_bounce_pool *pool = domain->bounce;

	/* Keep the range: a pool calls this function again, also if it did not become ready. */
	if (!pool->range)
		pool->range = dma_bounce_page_range(domain, dma_bounce_page_pool_size);
	if (!pool->range)
		return -ENOSPC;
	limits->iova = iova_dma_addr(pool->iovad, pool->range);
	limits->len = (u64)iova_size(pool->range) << iova_shift(pool->iovad);
	limits->chunk_size = DMA_BOUNCE_PAGE_CHUNK;
	limits->budget = min(limits->len, dma_bounce_page_limit());
	limits->source = &dma_bounce_page_total;
	return 0;
}

/* Allocates @size bytes on or near @node. If that fails, halves @size and tries again. */
static struct page *alloc_chunk(int node, size_t *size)
{
	gfp_t gfp = GFP_KERNEL | __GFP_ZERO | __GFP_NOWARN | __GFP_NORETRY;
	struct page *page;

	for (; *size >= DMA_BOUNCE_MIN_CHUNK; *size /= 2) {
		if (atomic_long_add_return(*size, &dma_bounce_page_total) <=
		    dma_bounce_page_limit()) {
			page = alloc_pages_node(node, gfp, get_order(*size));
			if (page)
				return page;
		}
		atomic_long_sub(*size, &dma_bounce_page_total);
	}
	return NULL;
}

/**
 * dma_bounce_page_bytes - get the memory that all pools together took from the kernel
 *
 * Return: the number of bytes
 */
size_t dma_bounce_page_bytes(void)
{
	return atomic_long_read(&dma_bounce_page_total);
}

static void free_chunk(struct page *page, size_t size)
{
	__free_pages(page, get_order(size));
	atomic_long_sub(size, &dma_bounce_page_total);
}

static void *page_add(struct iommu_domain *domain, dma_addr_t iova, size_t *size, int prot)
{
	struct page *page = alloc_chunk(domain->bounce->node, size);
	int ret;

	if (!page)
		return ERR_PTR(-ENOMEM);
	ret = iommu_map(domain, iova, page_to_phys(page), *size, prot | IOMMU_CACHE, GFP_KERNEL);
	if (ret) {
		free_chunk(page, *size);
		return ERR_PTR(ret);
	}
	return page_address(page);
}

static bool page_del(struct iommu_domain *domain, dma_addr_t iova, void *va, size_t size)
{
	/* Do not free memory that a device may still reach. */
	if (iommu_unmap(domain, iova, size) != size) {
		pr_err_ratelimited("cannot unmap the chunk at %pad\n", &iova);
		return false;
	}
	free_chunk(virt_to_page(va), size);
	return true;
}

const struct dma_bounce_ops dma_bounce_page_ops = {
	.name	= "pages",
	.limits	= page_limits,
	.add	= page_add,
	.del	= page_del,
};
