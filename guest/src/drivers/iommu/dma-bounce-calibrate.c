// SPDX-License-Identifier: GPL-2.0-only
/*
 * Measurement of the size up to which bouncing is cheaper than mapping
 *
 * The time of mapping and unmapping hardly depends on the size. The time of a copy grows with the
 * size. The threshold is the size at which the two times are equal. A pool uses this threshold if
 * neither the boot option nor the provider sets a threshold.
 *
 * Each time is the median of several measurements. Some times are too long because something
 * interrupted the measurement. Others are too short because the guest's clock stood still.
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
 * Returns the time in ns that a copy of CALIBRATE_COPY bytes takes, or 0 on failure. Each round
 * copies from another part of an area that is larger than a CPU's private cache, so this cache does
 * not contain the source. All rounds copy to the same memory, because slots are reused, too.
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
			/* Keep the compiler from removing the copy as unused. */
			barrier_data(to);
			times[i] = ktime_get_ns() - start;
		}
	}
	kvfree(area);
	kvfree(to);
	return median(times);
}

/* Returns the time in ns that mapping and unmapping a page takes, or 0 on failure. */
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
			/* A device may still reach the page: do not free the page or its IOVA. */
			pr_err("%s: cannot unmap the page at %pad\n", pool->name, &iova);
			return 0;
		}
		/* With a flush queue, many mappings share one flush, so do not time the flush. */
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
 * dma_bounce_calibrate - measure the size up to which a copy takes no longer than a mapping
 * @pool: a pool whose domain has a device
 *
 * May sleep. Logs the result.
 *
 * Return: the size in bytes, at least a page and at most the largest slot, or 0 if the measurement
 * failed.
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
