// SPDX-License-Identifier: GPL-2.0-only
/*
 * Measurement of the size up to which bouncing is cheaper than mapping
 *
 * The time of mapping and unmapping hardly depends on the size. The time of a copy grows with the
 * size. The threshold is the size at which the two times are equal. A pool uses this threshold if
 * neither the boot option nor the provider sets a threshold.
 *
 * Each direction has a threshold. Data for a device to read is copied before the DMA, from memory
 * that is usually not in the CPU's caches to a slot that usually is. Data that a device wrote is
 * copied after the DMA, from a slot to memory that is usually not in the caches.
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

/* The measured parts are at the start of the area, far from its end. */
static_assert(2 * CALIBRATE_ROUNDS * CALIBRATE_COPY <= CALIBRATE_AREA / 2);

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
 * Returns the time in ns that a copy of CALIBRATE_COPY bytes takes. Each round uses another part of
 * @cold, which is not in the CPU's private cache. All rounds use the same slot, because slots are
 * reused, too.
 */
static u64 time_copy(void *slot, void *cold, bool to_slot)
{
	u64 start, times[CALIBRATE_ROUNDS];
	unsigned int i;

	for (i = 0; i < CALIBRATE_ROUNDS; i++, cold += CALIBRATE_COPY) {
		start = ktime_get_ns();
		memcpy(to_slot ? slot : cold, to_slot ? cold : slot, CALIBRATE_COPY);
		/* Keep the compiler from removing the copy as unused. */
		barrier_data(to_slot ? slot : cold);
		times[i] = ktime_get_ns() - start;
	}
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

/* Returns a size in bytes. A copy of this size takes as long as a mapping. */
static u32 break_even(u64 map, u64 copy)
{
	u64 size = div64_u64(map * CALIBRATE_COPY, copy);

	return clamp_t(u64, round_down(size, SZ_512), PAGE_SIZE, DMA_BOUNCE_MAX_SLOT);
}

/**
 * dma_bounce_calibrate - measure the largest sizes whose copy takes no longer than a mapping
 * @pool: a pool whose domain has a device
 *
 * May sleep. Logs the result. Stores the sizes in the pool: each is at least a page and at most the
 * largest slot. They do not change if the measurement failed.
 */
void dma_bounce_calibrate(struct dma_bounce_pool *pool)
{
	void *area = kvmalloc(CALIBRATE_AREA, GFP_KERNEL);
	void *slot = kvmalloc(CALIBRATE_COPY, GFP_KERNEL);
	u64 map = time_map(pool), in = 0, out = 0;

	if (area && slot) {
		memset(slot, 0, CALIBRATE_COPY);
		/* Only the end of the area can be in the private cache after that. */
		memset(area, 0, CALIBRATE_AREA);
		in = time_copy(slot, area, true);
		out = time_copy(slot, area + CALIBRATE_ROUNDS * CALIBRATE_COPY, false);
	}
	kvfree(area);
	kvfree(slot);
	if (!map || !in || !out)
		return;
	pool->calibrated.read = break_even(map, in);
	pool->calibrated.write = break_even(map, out);
	pr_info("%s: thresholds %u KiB (device reads) and %u KiB (device writes): map and unmap take %llu ns, copying %u KiB %llu ns to a slot and %llu ns from a slot\n",
		pool->name, pool->calibrated.read >> 10, pool->calibrated.write >> 10, map,
		CALIBRATE_COPY >> 10, in, out);
}

/**
 * dma_bounce_set_thresholds - choose the thresholds of a pool
 * @pool: a pool whose domain has a device. The caller holds its mutex.
 * @advice: thresholds that the provider sets
 *
 * Measures the thresholds if neither the boot option nor the provider sets them. May sleep.
 */
void dma_bounce_set_thresholds(struct dma_bounce_pool *pool,
			       const struct dma_bounce_thresholds *advice)
{
	const struct dma_bounce_thresholds *option = &pool->threshold_option;
	u32 read = option->read ?: advice->read;
	u32 write = option->write ?: option->read ?: advice->write ?: advice->read;

	if ((!read || !write) && !pool->calibrated.read)
		dma_bounce_calibrate(pool);
	read = read ?: pool->calibrated.read;
	write = write ?: pool->calibrated.write;
	WRITE_ONCE(pool->threshold.read, min_not_zero(read, (u32)DMA_BOUNCE_MAX_SLOT));
	WRITE_ONCE(pool->threshold.write, min_not_zero(write, (u32)DMA_BOUNCE_MAX_SLOT));
}
