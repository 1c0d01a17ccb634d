/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What the parts of bouncing small DMA need of each other: whose DMA bounces (dma-bounce.c), how it
 * is mapped (dma-bounce-map.c, dma-bounce-request.c), what is copied (dma-bounce-copy.c).
 */
#ifndef _DMA_BOUNCE_MAP_H
#define _DMA_BOUNCE_MAP_H

#include <linux/dma-direction.h>
#include <linux/dma-map-ops.h>
#include <linux/dma-mapping.h>
#include <linux/iommu.h>
#include <linux/iommu-dma.h>
#include <linux/tracepoint-defs.h>

#include "dma-bounce.h"
#include "dma-bounce-pool.h"

DECLARE_TRACEPOINT(dma_bounce_map);
DECLARE_TRACEPOINT(dma_bounce_unmap);

static inline bool dma_bounce_untrusted(struct device *dev)
{
	return dev->iommu->bounce.untrusted;
}

/* The pool of a device's DMA domain, or NULL */
static inline struct dma_bounce_pool *dma_bounce_pool_of(struct device *dev)
{
	return READ_ONCE(dev->iommu->bounce.pool);
}

/* Size in bytes up to which mappings of a device bounce */
static inline size_t dma_bounce_threshold(struct dma_bounce_pool *pool, struct device *dev)
{
	return READ_ONCE(dev->iommu->bounce.threshold) ?: READ_ONCE(pool->threshold);
}

/* iommu.bounce=all was given at boot */
extern bool dma_bounce_all_devices;

/**
 * dma_bounce_wanted - whether small DMA of a device is to be bounced
 * @dev: the device, which has a DMA domain
 *
 * Return: what sysfs says, otherwise what the driver and the boot option say.
 */
static inline bool dma_bounce_wanted(struct device *dev)
{
	struct dma_bounce_device *bounce = &dev->iommu->bounce;
	u8 choice = READ_ONCE(bounce->choice);

	if (likely(choice == DMA_BOUNCE_SWITCH_AUTO))
		return READ_ONCE(bounce->opt_in) || dma_bounce_all_devices;
	return choice == DMA_BOUNCE_SWITCH_ON;
}

struct dma_bounce_pool *dma_bounce_pool_for(struct device *dev, unsigned long attrs);
void dma_bounce_fallback(struct dma_bounce_pool *pool, struct device *dev,
			 enum dma_bounce_stat reason);

void __dma_bounce_slot_fill(struct dma_bounce_pool *pool, struct device *dev,
			    struct dma_bounce_slot *slot);
void dma_bounce_slot_trace(struct device *dev, struct dma_bounce_slot *slot);
void dma_bounce_slot_trace_end(struct device *dev, struct dma_bounce_slot *slot, bool copy);
void dma_bounce_slot_copy(struct dma_bounce_pool *pool, struct dma_bounce_slot *slot,
			  struct scatterlist *sgl, size_t skip, size_t len, bool to_slot);
void dma_bounce_slot_sync(struct dma_bounce_pool *pool, struct device *dev,
			  struct dma_bounce_slot *slot, struct scatterlist *sgl, size_t skip,
			  size_t len, enum dma_data_direction dir, bool for_device);

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
 * @pool: the pool, which is usable
 * @dev: the device
 * @phys: what is mapped first: the address has those of its low bits that the device needs
 * @len: bytes
 * @limit: most bytes that bounce
 * @dir: direction of the transfer
 * @mapped: what the slot is for
 *
 * The slot's address itself has none of the low bits set, as it is aligned to its size. The caller
 * is in an RCU read-side critical section until it is done with the slot's memory. Inlined, as each
 * mapping runs through it.
 *
 * Return: a slot that has @offset, @len and @mapped set, or NULL with the reason counted.
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
 * dma_bounce_slot_fill - copy to a slot at map
 * @pool: its pool
 * @dev: the device that maps
 * @slot: a slot that says what is mapped by it
 * @dir: direction of the transfer
 * @attrs: attributes of the mapping
 */
static inline void dma_bounce_slot_fill(struct dma_bounce_pool *pool, struct device *dev,
					struct dma_bounce_slot *slot, enum dma_data_direction dir,
					unsigned long attrs)
{
	slot->no_copy_in = dir == DMA_FROM_DEVICE && (attrs & DMA_ATTR_BOUNCE_NO_COPY_IN) &&
			   !dma_bounce_untrusted(dev);
	if (!slot->no_copy_in)
		__dma_bounce_slot_fill(pool, dev, slot);
	if (tracepoint_enabled(dma_bounce_map))
		dma_bounce_slot_trace(dev, slot);
}

/**
 * dma_bounce_slot_finish - copy back at unmap what is to be copied back, and free the slot
 * @pool: its pool
 * @dev: the device that unmaps
 * @slot: a slot by which something is mapped
 * @sgl: the list that is unmapped, or NULL if it is none
 * @attrs: attributes of the unmapping
 */
static __always_inline void dma_bounce_slot_finish(struct dma_bounce_pool *pool, struct device *dev,
						   struct dma_bounce_slot *slot,
						   struct scatterlist *sgl, unsigned long attrs)
{
	bool copy = slot->chunk->kind != DMA_BOUNCE_READ && !(attrs & DMA_ATTR_SKIP_CPU_SYNC) &&
		    READ_ONCE(slot->chunk->state) != DMA_BOUNCE_DEAD;

	if (copy && slot->no_copy_in && !(attrs & DMA_ATTR_BOUNCE_ALL_WRITTEN)) {
		dma_bounce_count(pool, DMA_BOUNCE_UNWRITTEN, 1);
		copy = false;
	}
	if (copy)
		dma_bounce_slot_copy(pool, slot, sgl, 0, slot->len, false);
	if (tracepoint_enabled(dma_bounce_unmap))
		dma_bounce_slot_trace_end(dev, slot, copy);
	dma_bounce_slots_put(&pool->slots, slot);
}

/**
 * dma_bounce_need_sync - have the sync calls of a device reach us
 * @pool: the pool of the device's domain
 * @dev: a device that has bounced; a coherent one elides them otherwise
 */
static inline void dma_bounce_need_sync(struct dma_bounce_pool *pool, struct device *dev)
{
	/* Not dma_dev_need_sync(), by which debugging of the DMA API would hide this */
	if (likely(!dma_bounce_skips_sync(dev)))
		return;
	dma_reset_need_sync(dev);
	dma_bounce_count(pool, DMA_BOUNCE_ELISION_LOST, 1);
}

#endif /* _DMA_BOUNCE_MAP_H */
