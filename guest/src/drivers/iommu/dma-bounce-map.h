/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What the parts of bouncing small DMA need of each other: whose DMA bounces (dma-bounce.c), how it
 * is mapped (dma-bounce-map.c, dma-bounce-request.c), what is copied (dma-bounce-copy.c).
 */
#ifndef _DMA_BOUNCE_MAP_H
#define _DMA_BOUNCE_MAP_H

#include <linux/dma-direction.h>
#include <linux/iommu.h>
#include <linux/iommu-dma.h>
#include <linux/pci.h>

#include "dma-bounce-pool.h"

static inline bool dma_bounce_untrusted(struct device *dev)
{
	return dev_is_pci(dev) && to_pci_dev(dev)->untrusted;
}

/* The pool of a device's DMA domain, or NULL */
static inline struct dma_bounce_pool *dma_bounce_pool_of(struct device *dev)
{
	return iommu_get_dma_domain(dev)->bounce;
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
struct dma_bounce_slot *dma_bounce_slot_take(struct dma_bounce_pool *pool, struct device *dev,
					     phys_addr_t phys, size_t len, size_t limit,
					     enum dma_data_direction dir);
void dma_bounce_need_sync(struct dma_bounce_pool *pool, struct device *dev);
void dma_bounce_fallback(struct dma_bounce_pool *pool, struct device *dev,
			 enum dma_bounce_stat reason);

void dma_bounce_slot_fill(struct dma_bounce_pool *pool, struct device *dev,
			  struct dma_bounce_slot *slot, enum dma_data_direction dir,
			  unsigned long attrs);
void dma_bounce_slot_finish(struct dma_bounce_pool *pool, struct device *dev,
			    struct dma_bounce_slot *slot, unsigned long attrs);
void dma_bounce_slot_sync(struct dma_bounce_pool *pool, struct device *dev,
			  struct dma_bounce_slot *slot, size_t skip, size_t len,
			  enum dma_data_direction dir, bool for_device);

#ifdef CONFIG_IOMMU_DMA_BOUNCE_REQUEST
void dma_bounce_copy_request(void *buffer, struct request *req, size_t skip, size_t len,
			     bool to_buffer);
#else
static inline void dma_bounce_copy_request(void *buffer, struct request *req, size_t skip,
					   size_t len, bool to_buffer)
{
}
#endif

#endif /* _DMA_BOUNCE_MAP_H */
