/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Mapping by slots: hooks that dma-iommu.c calls first. As long as no domain has a pool, each hook
 * costs one patched branch.
 */
#ifndef _DMA_BOUNCE_MAP_H
#define _DMA_BOUNCE_MAP_H

#include <linux/dma-direction.h>
#include <linux/dma-mapping.h>
#include <linux/jump_label.h>
#include <linux/mm.h>

#include "dma-bounce-device.h"

#ifdef CONFIG_IOMMU_DMA_BOUNCE

bool __dma_bounce_map_page(struct device *dev, phys_addr_t phys, size_t size,
			   enum dma_data_direction dir, unsigned long attrs, dma_addr_t *addr);
bool __dma_bounce_unmap_page(struct device *dev, dma_addr_t addr, unsigned long attrs);
bool __dma_bounce_by_piece(struct device *dev);
bool __dma_bounce_by_entry(struct device *dev, struct scatterlist *sgl, int nents);
int __dma_bounce_map_sg(struct device *dev, struct scatterlist *sgl, int nents,
			enum dma_data_direction dir, unsigned long attrs);
bool __dma_bounce_unmap_sg(struct device *dev, struct scatterlist *sgl, int nents,
			   unsigned long attrs);
bool __dma_bounce_sync_single(struct device *dev, dma_addr_t addr, size_t size,
			      enum dma_data_direction dir, bool for_device);
bool __dma_bounce_sync_sg(struct device *dev, struct scatterlist *sgl, int nents,
			  enum dma_data_direction dir, bool for_device);

/*
 * Returns false if the caller must map the memory itself. Otherwise sets @addr to the address for
 * the device, or to DMA_MAPPING_ERROR if the memory must not be mapped.
 */
static inline bool dma_bounce_map_page(struct device *dev, phys_addr_t phys, size_t size,
				       enum dma_data_direction dir, unsigned long attrs,
				       dma_addr_t *addr)
{
	return static_branch_unlikely(&dma_bounce_key) &&
	       __dma_bounce_map_page(dev, phys, size, dir, attrs, addr);
}

/* Like dma_bounce_map_page(), for memory that may have no pages */
static inline bool dma_bounce_map_phys(struct device *dev, phys_addr_t phys, size_t size,
				       enum dma_data_direction dir, unsigned long attrs,
				       dma_addr_t *addr)
{
	return static_branch_unlikely(&dma_bounce_key) && pfn_valid(PHYS_PFN(phys)) &&
	       __dma_bounce_map_page(dev, phys, size, dir, attrs, addr);
}

/*
 * Returns true if the address belongs to a pool, and was unmapped. The other hooks for unmapping
 * and synchronising also return true if their mapping belongs to a pool.
 */
static inline bool dma_bounce_unmap_page(struct device *dev, dma_addr_t addr, unsigned long attrs)
{
	return static_branch_unlikely(&dma_bounce_key) &&
	       __dma_bounce_unmap_page(dev, addr, attrs);
}

/* Returns true if the caller must map the pieces of a larger mapping one by one. */
static inline bool dma_bounce_by_piece(struct device *dev)
{
	return static_branch_unlikely(&dma_bounce_key) && __dma_bounce_by_piece(dev);
}

/* Returns true if the caller must map the entries of a list one by one. */
static inline bool dma_bounce_by_entry(struct device *dev, struct scatterlist *sgl, int nents)
{
	return static_branch_unlikely(&dma_bounce_key) && __dma_bounce_by_entry(dev, sgl, nents);
}

/* Returns the number of DMA segments, or 0 if the caller must map the list. */
static inline int dma_bounce_map_sg(struct device *dev, struct scatterlist *sgl, int nents,
				    enum dma_data_direction dir, unsigned long attrs)
{
	if (static_branch_unlikely(&dma_bounce_key))
		return __dma_bounce_map_sg(dev, sgl, nents, dir, attrs);
	return 0;
}

static inline bool dma_bounce_unmap_sg(struct device *dev, struct scatterlist *sgl, int nents,
				       unsigned long attrs)
{
	return static_branch_unlikely(&dma_bounce_key) &&
	       __dma_bounce_unmap_sg(dev, sgl, nents, attrs);
}

static inline bool dma_bounce_sync_single(struct device *dev, dma_addr_t addr, size_t size,
					  enum dma_data_direction dir, bool for_device)
{
	return static_branch_unlikely(&dma_bounce_key) &&
	       __dma_bounce_sync_single(dev, addr, size, dir, for_device);
}

static inline bool dma_bounce_sync_sg(struct device *dev, struct scatterlist *sgl, int nents,
				      enum dma_data_direction dir, bool for_device)
{
	return static_branch_unlikely(&dma_bounce_key) &&
	       __dma_bounce_sync_sg(dev, sgl, nents, dir, for_device);
}

#else /* !CONFIG_IOMMU_DMA_BOUNCE */

static inline bool dma_bounce_map_page(struct device *dev, phys_addr_t phys, size_t size,
				       enum dma_data_direction dir, unsigned long attrs,
				       dma_addr_t *addr)
{
	return false;
}

static inline bool dma_bounce_map_phys(struct device *dev, phys_addr_t phys, size_t size,
				       enum dma_data_direction dir, unsigned long attrs,
				       dma_addr_t *addr)
{
	return false;
}

static inline bool dma_bounce_unmap_page(struct device *dev, dma_addr_t addr, unsigned long attrs)
{
	return false;
}

static inline bool dma_bounce_by_piece(struct device *dev)
{
	return false;
}

static inline bool dma_bounce_by_entry(struct device *dev, struct scatterlist *sgl, int nents)
{
	return false;
}

static inline int dma_bounce_map_sg(struct device *dev, struct scatterlist *sgl, int nents,
				    enum dma_data_direction dir, unsigned long attrs)
{
	return 0;
}

static inline bool dma_bounce_unmap_sg(struct device *dev, struct scatterlist *sgl, int nents,
				       unsigned long attrs)
{
	return false;
}

static inline bool dma_bounce_sync_single(struct device *dev, dma_addr_t addr, size_t size,
					  enum dma_data_direction dir, bool for_device)
{
	return false;
}

static inline bool dma_bounce_sync_sg(struct device *dev, struct scatterlist *sgl, int nents,
				      enum dma_data_direction dir, bool for_device)
{
	return false;
}

#endif /* CONFIG_IOMMU_DMA_BOUNCE */
#endif /* _DMA_BOUNCE_MAP_H */
