// SPDX-License-Identifier: GPL-2.0-only
/*
 * Measures up to which size bouncing is cheaper than mapping
 *
 * Mapping and unmapping cost about the same whatever the size, copying costs by the byte. The size
 * at which they meet is the threshold of a pool whose provider knows none. The median of several
 * measurements counts: some are longer because something came between, some are shorter because the
 * clock of a guest stood still.
 */

#define pr_fmt(fmt) "iommu: bounce: " fmt

#include <linux/gfp.h>
#include <linux/iova.h>
#include <linux/ktime.h>
#include <linux/math64.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/sort.h>

#include "dma-bounce-calibrate.h"
#include "dma-bounce-types.h"

#define CALIBRATE_ROUNDS	9
#define CALIBRATE_COPY		SZ_64K
#define CALIBRATE_AREA		SZ_8M

static_assert(CALIBRATE_ROUNDS * CALIBRATE_COPY <= CALIBRATE_AREA);

static int compare_times(const void *a, const void *b)
{
	const u64 *x = a, *y = b;

	return (*x > *y) - (*x < *y);
}

static u64 median(u64 *times)
{
	sort(times, CALIBRATE_ROUNDS, sizeof(*times), compare_times, NULL);
	return times[CALIBRATE_ROUNDS / 2];
}

/*
 * Time for copying CALIBRATE_COPY bytes in ns, or 0 if it cannot be told. What is copied was not
 * touched just before: each time it is another part of an area that is larger than what a CPU
 * caches for itself. Where it is copied to is used over and over again, as slots are.
 */
static u64 time_copy(void)
{
	void *area = kvmalloc(CALIBRATE_AREA, GFP_KERNEL);
	void *to = kvmalloc(CALIBRATE_COPY, GFP_KERNEL);
	u64 start, times[CALIBRATE_ROUNDS] = {};
	unsigned int i;

	if (area && to) {
		memset(to, 0, CALIBRATE_COPY);
		memset(area, 0, CALIBRATE_AREA);
		for (i = 0; i < CALIBRATE_ROUNDS; i++) {
			start = ktime_get_ns();
			memcpy(to, area + i * CALIBRATE_COPY, CALIBRATE_COPY);
			/* The copy is not to be left out as unused. */
			barrier_data(to);
			times[i] = ktime_get_ns() - start;
		}
	}
	kvfree(area);
	kvfree(to);
	return median(times);
}

/* Time for mapping and unmapping a page in ns, or 0 if it cannot be told */
static u64 time_map(struct dma_bounce_pool *pool)
{
	unsigned long shift = iova_shift(pool->iovad), pages, pfn;
	struct iommu_domain *domain = pool->domain;
	struct iommu_iotlb_gather gather;
	u64 start, times[CALIBRATE_ROUNDS] = {}, limit = READ_ONCE(pool->mask);
	size_t len = iova_align(pool->iovad, PAGE_SIZE);
	unsigned int i = 0;
	dma_addr_t iova;
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
	for (; i < CALIBRATE_ROUNDS; i++) {
		iommu_iotlb_gather_init(&gather);
		gather.queued = domain->type == IOMMU_DOMAIN_DMA_FQ;
		start = ktime_get_ns();
		if (iommu_map(domain, iova, virt_to_phys(va), len, IOMMU_READ | IOMMU_CACHE,
			      GFP_KERNEL))
			break;
		if (iommu_unmap_fast(domain, iova, len, &gather) != len) {
			/* A device may still reach the page: leave it and its address alone. */
			pr_err("%s: cannot unmap the page at %pad\n", pool->name, &iova);
			return 0;
		}
		/* With a flush queue, this is shared by many. */
		if (!gather.queued)
			iommu_iotlb_sync(domain, &gather);
		times[i] = ktime_get_ns() - start;
		if (gather.queued && domain->ops->flush_iotlb_all)
			domain->ops->flush_iotlb_all(domain);
	}
	free_iova_fast(pool->iovad, pfn, pages);
out_free_va:
	free_pages((unsigned long)va, get_order(len));
	return i == CALIBRATE_ROUNDS ? median(times) : 0;
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
