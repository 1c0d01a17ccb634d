// SPDX-License-Identifier: GPL-2.0-only
/*
 * Measures up to which size bouncing is cheaper than mapping
 *
 * Mapping and unmapping cost about the same whatever the size, copying costs by the byte. The size
 * at which they meet is the threshold of a pool whose provider knows none. The least of several
 * measurements counts: whatever disturbs one makes it longer.
 */

#define pr_fmt(fmt) "iommu: bounce: " fmt

#include <linux/gfp.h>
#include <linux/iova.h>
#include <linux/ktime.h>
#include <linux/math64.h>
#include <linux/mm.h>
#include <linux/slab.h>

#include "dma-bounce-pool.h"

#define CALIBRATE_ROUNDS	8
#define CALIBRATE_COPY		SZ_64K

/* Time for copying CALIBRATE_COPY bytes in ns, or 0 if there is no memory */
static u64 time_copy(void)
{
	void *from = kvmalloc(CALIBRATE_COPY, GFP_KERNEL);
	void *to = kvmalloc(CALIBRATE_COPY, GFP_KERNEL);
	u64 start, best = U64_MAX;
	unsigned int i;

	if (from && to) {
		/* Each byte is copied in a cold state once, which does not count. */
		memset(from, 0, CALIBRATE_COPY);
		for (i = 0; i < CALIBRATE_ROUNDS; i++) {
			start = ktime_get_ns();
			memcpy(to, from, CALIBRATE_COPY);
			/* The copy is not to be left out as unused. */
			barrier_data(to);
			best = min(best, ktime_get_ns() - start);
		}
	}
	kvfree(from);
	kvfree(to);
	return best == U64_MAX ? 0 : max(best, 1ULL);
}

/* Time for mapping and unmapping a page in ns, or 0 if it cannot be mapped */
static u64 time_map(struct dma_bounce_pool *pool)
{
	unsigned long shift = iova_shift(pool->iovad), pages, pfn;
	struct iommu_domain *domain = pool->domain;
	struct iommu_iotlb_gather gather;
	u64 start, best = U64_MAX, limit = READ_ONCE(pool->mask);
	size_t len = iova_align(pool->iovad, PAGE_SIZE);
	dma_addr_t iova;
	unsigned int i;
	void *va;

	if (domain->geometry.force_aperture)
		limit = min_t(u64, limit, domain->geometry.aperture_end);
	va = (void *)__get_free_pages(GFP_KERNEL | __GFP_ZERO | __GFP_NOWARN, get_order(len));
	if (!va)
		return 0;
	pages = len >> shift;
	pfn = alloc_iova_fast(pool->iovad, pages, limit >> shift, true);
	if (!pfn)
		goto out_free_va;
	iova = (dma_addr_t)pfn << shift;
	for (i = 0; i < CALIBRATE_ROUNDS; i++) {
		iommu_iotlb_gather_init(&gather);
		gather.queued = domain->type == IOMMU_DOMAIN_DMA_FQ;
		start = ktime_get_ns();
		if (iommu_map(domain, iova, virt_to_phys(va), len, IOMMU_READ | IOMMU_CACHE,
			      GFP_KERNEL))
			break;
		if (iommu_unmap_fast(domain, iova, len, &gather) != len) {
			/* A device may still reach the page: leave it and its address alone. */
			WARN_ON_ONCE(1);
			return 0;
		}
		/* With a flush queue, this is shared by many. */
		if (!gather.queued)
			iommu_iotlb_sync(domain, &gather);
		best = min(best, ktime_get_ns() - start);
		if (gather.queued && domain->ops->flush_iotlb_all)
			domain->ops->flush_iotlb_all(domain);
	}
	free_iova_fast(pool->iovad, pfn, pages);
out_free_va:
	free_pages((unsigned long)va, get_order(len));
	return best == U64_MAX ? 0 : best;
}

/**
 * dma_bounce_calibrate - find the size at which copying costs what mapping costs
 * @pool: a pool whose domain has a device
 *
 * May sleep. Tells the result in the log.
 *
 * Return: bytes, at least a page and at most the largest slot; 0 if it could not be measured.
 */
size_t dma_bounce_calibrate(struct dma_bounce_pool *pool)
{
	u64 copy = time_copy(), map = time_map(pool), threshold;

	if (!copy || !map)
		return 0;
	threshold = div64_u64(map * CALIBRATE_COPY, copy);
	threshold = clamp_t(u64, round_down(threshold, SZ_512), PAGE_SIZE, DMA_BOUNCE_MAX_SLOT);
	pr_info("%s: threshold %llu KiB: map and unmap take %llu ns, copying %u KiB %llu ns\n",
		pool->name, threshold >> 10, map, CALIBRATE_COPY >> 10, copy);
	return threshold;
}
