/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Decision whether a mapping may bounce, and the slot for it. These functions are inline because
 * mappings of all types run through them.
 */
#ifndef _DMA_BOUNCE_TAKE_H
#define _DMA_BOUNCE_TAKE_H

#include <linux/dma-direction.h>
#include <linux/dma-map-ops.h>
#include <linux/dma-mapping.h>
#include <linux/iommu.h>
#include <linux/memremap.h>

#include "dma-bounce-device.h"
#include "dma-bounce-pool.h"
#include "dma-bounce-types.h"

/*
 * Attributes of mappings that never bounce. With DMA_ATTR_SKIP_CPU_SYNC, the driver synchronises
 * later, and the sync call may cover memory outside the slot. The other attributes mark mappings
 * that are never synchronised, that need privileged access, or that are MMIO.
 */
#define DMA_BOUNCE_NEVER	(DMA_ATTR_SKIP_CPU_SYNC | DMA_ATTR_PRIVILEGED | \
				 DMA_ATTR_REQUIRE_COHERENT | DMA_ATTR_MMIO)

/*
 * Returns true if the CPU can copy the data of a page: RAM, or pages of a file or device with DAX.
 * Memory of a device is not copied, because its user wants the devices to access it directly.
 */
static inline bool dma_bounce_can_copy(const struct page *page)
{
	if (likely(!is_zone_device_page(page)))
		return true;
	return page_pgmap(page)->type == MEMORY_DEVICE_FS_DAX ||
	       page_pgmap(page)->type == MEMORY_DEVICE_GENERIC;
}

void dma_bounce_fallback(struct dma_bounce_pool *pool, struct device *dev,
			 enum dma_bounce_stat reason);
void dma_bounce_unusable(struct dma_bounce_pool *pool, struct device *dev, u64 len, u64 mask);

static inline u64 dma_bounce_mask(struct device *dev)
{
	return min_not_zero(dma_get_mask(dev), dev->bus_dma_limit);
}

/* Returns the pool of a device's DMA domain if the pool may serve the device, otherwise NULL. */
static inline struct dma_bounce_pool *dma_bounce_pool_in(struct device *dev)
{
	/* A kdump kernel attaches a device only when the device first maps memory. */
	if (!dev_is_dma_coherent(dev) || dev->iommu->attach_deferred)
		return NULL;
	return dma_bounce_pool_of(dev);
}

/* Returns true if the attributes allow a mapping to bounce. Otherwise counts a fallback. */
static inline bool dma_bounce_attrs_allow(struct dma_bounce_pool *pool, struct device *dev,
					  unsigned long attrs)
{
	if (likely(!(attrs & DMA_BOUNCE_NEVER)))
		return true;
	dma_bounce_fallback(pool, dev, DMA_BOUNCE_FB_ATTRS);
	return false;
}

/* Returns true if the pool has slots that the device can address. Otherwise counts the reason. */
static __always_inline bool dma_bounce_usable(struct dma_bounce_pool *pool, struct device *dev)
{
	u64 len = smp_load_acquire(&pool->slots.len);	/* pairs with dma_bounce_slots_open() */
	u64 mask = dma_bounce_mask(dev);

	if (likely(len && pool->slots.base + len - 1 <= mask))
		return true;
	dma_bounce_unusable(pool, dev, len, mask);
	return false;
}

/**
 * dma_bounce_pool_for - find the pool for a mapping that should bounce as a whole
 * @dev: the device
 * @attrs: attributes of the mapping
 *
 * Return: a usable pool, or NULL if the mapping does not bounce.
 */
static inline struct dma_bounce_pool *dma_bounce_pool_for(struct device *dev,
							  unsigned long attrs)
{
	struct dma_bounce_pool *pool = dma_bounce_pool_in(dev);

	if (!pool || !dma_bounce_wanted(dev) || !dma_bounce_attrs_allow(pool, dev, attrs) ||
	    !dma_bounce_usable(pool, dev))
		return NULL;
	return pool;
}

static inline enum dma_bounce_kind dma_bounce_kind(enum dma_data_direction dir)
{
	switch (dir) {
	case DMA_TO_DEVICE:
		return DMA_BOUNCE_READ;
	case DMA_FROM_DEVICE:
		return DMA_BOUNCE_WRITE;
	default:
		return DMA_BOUNCE_RW;
	}
}

/**
 * dma_bounce_slot_take - take a slot for a mapping
 * @pool: a usable pool
 * @dev: the device
 * @phys: first address of the mapped memory. The device's address gets the same low bits, as far
 *	as the device's min_align_mask requires.
 * @len: number of bytes to map
 * @limit: maximum number of bytes that bounce
 * @dir: direction of the transfer
 * @mapped: type of mapping that the slot is for
 *
 * A slot is aligned to its size, so the low bits of its own address are 0. The caller is in an RCU
 * read-side critical section until it no longer uses the slot's memory. The function is inline
 * because each mapping runs through it.
 *
 * Return: a slot with offset, len and mapped set, or NULL. If NULL, the reason was counted.
 */
static __always_inline struct dma_bounce_slot *
dma_bounce_slot_take(struct dma_bounce_pool *pool, struct device *dev, phys_addr_t phys, size_t len,
		     size_t limit, enum dma_data_direction dir, enum dma_bounce_mapped mapped)
{
	size_t align = dma_get_min_align_mask(dev), offset = phys & align;
	struct dma_bounce_slot *slot;

	if (len > limit || align >= DMA_BOUNCE_MAX_SLOT || offset + len > DMA_BOUNCE_MAX_SLOT) {
		dma_bounce_fallback(pool, dev, DMA_BOUNCE_FB_SIZE);
		return NULL;
	}
	slot = dma_bounce_pool_get(pool, dma_bounce_kind(dir), max(offset + len, align + 1),
				   mapped);
	if (!slot) {
		dma_bounce_fallback(pool, dev, DMA_BOUNCE_FB_FULL);
		return NULL;
	}
	slot->offset = offset;
	WRITE_ONCE(slot->len, len);
	return slot;
}

/**
 * dma_bounce_reset_need_sync - stop the elision of a device's sync calls
 * @pool: the pool of the device's domain
 * @dev: a device that has bounced. Coherent devices elide sync calls by default.
 */
static inline void dma_bounce_reset_need_sync(struct dma_bounce_pool *pool, struct device *dev)
{
	/* Do not use dma_dev_need_sync(), because debugging of the DMA API makes it always true. */
	if (likely(!dev_dma_skip_sync(dev)))
		return;
	dma_reset_need_sync(dev);
	dma_bounce_count(pool, DMA_BOUNCE_ELISION_LOST, 1);
}

#endif /* _DMA_BOUNCE_TAKE_H */
